/* tensor.hpp - turns an at::Tensor into a pointer, a count and a dtype, with checks that name the argument.
 * Also holds the table that says which reductions spccl runs and which Gloo or NCCL (docs/TORCH.md shows it).
 *
 * May include: spccl.h, torch_compat.hpp. */
#pragma once

#include "torch_compat.hpp"

#include <spccl_experimental.h>

#include <string>
#include <vector>

namespace spccl_torch
{

/* Describes one collective for error texts. The text is composed only when something fails. */
struct OpText {
    const char *name = ""; /* "all_reduce" */
    size_t n_elems = 0;    /* elements of the tensor that the user gave */
    c10::ScalarType dtype = c10::ScalarType::Undefined;
    const char *reduction = nullptr; /* "sum" ..., or NULL */
    int root = -1;                   /* of a broadcast */

    std::string str() const; /* "all_reduce(sum) of 1024 x float32" */
};

/* How a tensor's elements travel: every element becomes `per_elem` wire elements of `dtype`. */
struct WireType {
    spccl_dtype dtype;
    size_t per_elem;
};

/* The wire type for all-gather and broadcast, which only move bits: bool as uint8, complex as two floats,
 * unsigned integers as signed ones of the same width. Throws TypeError for quantized dtypes. */
WireType wire_for_moving(c10::ScalarType dtype, const OpText &op);

/* What runs a reduction. spccl runs PREMUL_SUM as a sum of scaled inputs. neither: not spccl and not Gloo, but NCCL may
 * have it for CUDA tensors. */
enum class Route { spccl, gloo, neither };
/* The table of docs/TORCH.md, section "Who does what". */
Route reduction_route(c10::ScalarType dtype, c10d::ReduceOp::RedOpType op);
/* The spccl_redop of a reduction with route spccl. PREMUL_SUM gives SPCCL_SUM: its inputs are
 * scaled first. */
spccl_redop redop_of(c10d::ReduceOp::RedOpType op);
/* spccl's dtype for a reduction that spccl runs. */
spccl_dtype dtype_for_reducing(c10::ScalarType dtype);
const char *redop_name(c10d::ReduceOp::RedOpType op);
/* Throws TypeError for a reduction that neither spccl nor Gloo has, and says which dtypes would do. */
[[noreturn]] void refuse_reduction(const OpText &op);

/* The only tensor of `tensors`. Throws ValueError for another number (old versions of torch passed one tensor
 * per device). */
at::Tensor &only(std::vector<at::Tensor> &tensors, const char *arg, const char *op);
/* Throws unless `t` is a dense tensor in host memory or on a CUDA device. */
void check_dense(const at::Tensor &t, const char *arg, const char *op);
/* check_dense, and throws if two elements of `t` share memory, as after torch.Tensor.expand. */
void check_output(const at::Tensor &t, const char *arg, const char *op);
/* Throws unless `t` has the dtype and the device of `want`. */
void check_like(const at::Tensor &want, const at::Tensor &t, const char *arg, const char *op);
void check_numel(const at::Tensor &t, int64_t want, const char *arg, const char *op, const char *why);

/* Throws unless `list` has one entry for each rank. */
template <class List> void check_list(const List &list, int size, const char *arg, const char *op)
{
    TORCH_CHECK_VALUE(list.size() == static_cast<size_t>(size), "spccl: ", op, ": ", arg, " has ",
                      std::to_string(list.size()), " entries, wanted ", std::to_string(size),
                      ", one per rank");
}

/* Whether spccl can read and write `t` without a copy: contiguous, aligned to its elements, no lazy sign or
 * conjugate. */
bool is_plain(const at::Tensor &t);
/* `t` itself if it is plain, else a plain copy of its values. */
at::Tensor as_contiguous(const at::Tensor &t);
/* The address of the first element. For an empty tensor some address that is not NULL. */
void *address(const at::Tensor &t);
/* The address of the first tensor if the tensors lie one after the other in memory (views of one buffer, as
 * torch.Tensor.chunk makes them); else NULL. All have `numel` elements. */
void *address_if_adjacent(const std::vector<at::Tensor> &tensors, int64_t numel);

} // namespace spccl_torch
