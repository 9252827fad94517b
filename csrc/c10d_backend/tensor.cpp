/* tensor.cpp - see tensor.hpp. */
#include "tensor.hpp"

#include <ATen/MemoryOverlap.h>

#include <optional>

namespace spccl_torch
{

std::string OpText::str() const
{
    std::string text = name;
    if (reduction != nullptr)
        text += std::string("(") + reduction + ")";
    if (root >= 0)
        text += " from rank " + std::to_string(root);
    text += " of " + std::to_string(n_elems) + " x " +
            (dtype == c10::ScalarType::Undefined ? "?" : c10::toString(dtype));
    return text;
}

namespace
{
/* spccl's dtype for elements that spccl can add; nothing for others. */
std::optional<spccl_dtype> arithmetic_dtype(c10::ScalarType dtype)
{
    switch (dtype) {
    case c10::ScalarType::Float:
        return SPCCL_FLOAT32;
    case c10::ScalarType::Double:
        return SPCCL_FLOAT64;
    case c10::ScalarType::Half:
        return SPCCL_FLOAT16;
    case c10::ScalarType::BFloat16:
        return SPCCL_BFLOAT16;
    case c10::ScalarType::Char:
        return SPCCL_INT8;
    case c10::ScalarType::Byte:
        return SPCCL_UINT8;
    case c10::ScalarType::Short:
        return SPCCL_INT16;
    case c10::ScalarType::Int:
        return SPCCL_INT32;
    case c10::ScalarType::Long:
        return SPCCL_INT64;
    default:
        return std::nullopt;
    }
}
} // namespace

WireType wire_for_moving(c10::ScalarType dtype, const OpText &op)
{
    TORCH_CHECK_TYPE(!c10::isQIntType(dtype), "spccl: ", op.str(),
                     ": quantized tensors are not taken; send "
                     "tensor.int_repr()");
    if (const auto known = arithmetic_dtype(c10::toRealValueType(dtype)))
        return {*known, c10::isComplexType(dtype) ? size_t{2} : size_t{1}};
    if (c10::isFloat8Type(dtype))
        return {SPCCL_FLOAT8, 1};
    switch (c10::elementSize(dtype)) {
    case 1:
        return {SPCCL_UINT8, 1};
    case 2:
        return {SPCCL_INT16, 1};
    case 4:
        return {SPCCL_INT32, 1};
    case 8:
        return {SPCCL_INT64, 1};
    default:
        TORCH_CHECK_TYPE(false, "spccl: ", op.str(), ": elements of ",
                         std::to_string(c10::elementSize(dtype)), " bytes are not taken");
    }
}

namespace
{
enum class Kind { floating, gloo_integer, other_integer, boolean, unknown };

Kind kind_of(c10::ScalarType dtype)
{
    switch (dtype) {
    case c10::ScalarType::Float:
    case c10::ScalarType::Double:
    case c10::ScalarType::Half:
    case c10::ScalarType::BFloat16:
        return Kind::floating;
    case c10::ScalarType::Char:
    case c10::ScalarType::Byte:
    case c10::ScalarType::Int:
    case c10::ScalarType::Long:
        return Kind::gloo_integer;
    case c10::ScalarType::Short: /* Gloo has no int16 */
        return Kind::other_integer;
    case c10::ScalarType::Bool:
        return Kind::boolean;
    default:
        return Kind::unknown;
    }
}
} // namespace

Route reduction_route(c10::ScalarType dtype, c10d::ReduceOp::RedOpType op)
{
    const Kind kind = kind_of(dtype);
    const bool integer = kind == Kind::gloo_integer || kind == Kind::other_integer;

    switch (op) {
    case c10d::ReduceOp::SUM:
    case c10d::ReduceOp::AVG:
    case c10d::ReduceOp::PRODUCT:
    case c10d::ReduceOp::MIN:
    case c10d::ReduceOp::MAX:
        if (kind == Kind::floating || integer)
            return Route::spccl;
        return kind == Kind::boolean && op != c10d::ReduceOp::AVG ? Route::gloo : Route::neither;
    case c10d::ReduceOp::PREMUL_SUM:
        return kind == Kind::floating ? Route::spccl : Route::neither;
    case c10d::ReduceOp::BAND:
    case c10d::ReduceOp::BOR:
    case c10d::ReduceOp::BXOR:
        return kind == Kind::gloo_integer || kind == Kind::boolean ? Route::gloo : Route::neither;
    case c10d::ReduceOp::UNUSED:
        return Route::neither;
    }
    return Route::neither; /* a reduction of a later torch */
}

namespace
{
/* By c10d's number. What spccl does not run has no redop. */
constexpr struct {
    const char *name;
    std::optional<spccl_redop> redop;
} reductions[] = {{"sum", SPCCL_SUM}, {"avg", SPCCL_AVG}, {"product", SPCCL_PROD},
                  {"min", SPCCL_MIN}, {"max", SPCCL_MAX}, {"band", {}},
                  {"bor", {}},        {"bxor", {}},       {"premul_sum", SPCCL_SUM}};
} // namespace

spccl_redop redop_of(c10d::ReduceOp::RedOpType op)
{
    TORCH_INTERNAL_ASSERT(op < std::size(reductions) && reductions[op].redop,
                          "spccl: spccl does not run reduction ", redop_name(op));
    return *reductions[op].redop;
}

spccl_dtype dtype_for_reducing(c10::ScalarType dtype)
{
    const auto known = arithmetic_dtype(dtype);
    TORCH_INTERNAL_ASSERT(known, "spccl: spccl does not reduce ", dtype);
    return *known;
}

const char *redop_name(c10d::ReduceOp::RedOpType op)
{
    return op < std::size(reductions) ? reductions[op].name : "?";
}

void refuse_reduction(const OpText &op)
{
    TORCH_CHECK_TYPE(false, "spccl: ", op.str(),
                     ": no such reduction. sum, product, min, max: float16, bfloat16, float32, float64, int8 "
                     "to int64, uint8, "
                     "bool. avg: the same without bool. premul_sum: the floats of these. band, bor, bxor: "
                     "int8, uint8, int32, "
                     "int64, bool. For other dtypes use tensor.to(), for complex torch.view_as_real().");
}

at::Tensor &only(std::vector<at::Tensor> &tensors, const char *arg, const char *op)
{
    TORCH_CHECK_VALUE(tensors.size() == 1, "spccl: ", op, ": ", arg, ": got ", std::to_string(tensors.size()),
                      " tensors, wanted one per process");
    return tensors[0];
}

void check_dense(const at::Tensor &t, const char *arg, const char *op)
{
    TORCH_CHECK_VALUE(t.defined(), "spccl: ", op, ": ", arg, " is an undefined tensor");
    TORCH_CHECK_VALUE(t.device().is_cpu() || t.device().is_cuda(), "spccl: ", op, ": ", arg, " is on ",
                      t.device(), ": spccl moves CPU and CUDA tensors; use tensor.cpu()");
    TORCH_CHECK_VALUE(
        t.layout() == c10::Layout::Strided, "spccl: ", op, ": ", arg, " has layout ", t.layout(),
        ": only all_reduce takes a sparse tensor, and only torch.sparse_coo; use tensor.to_dense()");
}

void check_output(const at::Tensor &t, const char *arg, const char *op)
{
    check_dense(t, arg, op);
    TORCH_CHECK_VALUE(
        at::has_internal_overlap(t) != at::MemOverlap::Yes, "spccl: ", op, ": ", arg,
        ": several elements share one memory location (an expanded tensor); use tensor.clone()");
}

void check_like(const at::Tensor &want, const at::Tensor &t, const char *arg, const char *op)
{
    TORCH_CHECK_TYPE(t.scalar_type() == want.scalar_type(), "spccl: ", op, ": ", arg, " is ", t.scalar_type(),
                     ", wanted ", want.scalar_type(), " as the other tensors of this call");
    TORCH_CHECK_VALUE(t.device() == want.device(), "spccl: ", op, ": ", arg, " is on ", t.device(),
                      ", wanted ", want.device(),
                      " as the other tensors of this call: move one of them (tensor.to)");
}

void check_numel(const at::Tensor &t, int64_t want, const char *arg, const char *op, const char *why)
{
    TORCH_CHECK_VALUE(t.numel() == want, "spccl: ", op, ": ", arg, " has ", std::to_string(t.numel()),
                      " elements, wanted ", std::to_string(want), " (", why, ")");
}

bool is_plain(const at::Tensor &t)
{
    return t.is_contiguous() && !t.is_conj() && !t.is_neg() &&
           reinterpret_cast<uintptr_t>(t.const_data_ptr()) % static_cast<uintptr_t>(t.element_size()) == 0;
}

at::Tensor as_contiguous(const at::Tensor &t)
{
    if (is_plain(t))
        return t;
    at::NoGradGuard no_grad;
    return t.resolve_conj().resolve_neg().clone(at::MemoryFormat::Contiguous);
}

void *address(const at::Tensor &t)
{
    alignas(64) static unsigned char nothing[64];
    return t.numel() == 0 ? nothing : t.data_ptr();
}

void *address_if_adjacent(const std::vector<at::Tensor> &tensors, int64_t numel)
{
    if (tensors.empty() || numel == 0)
        return nullptr;
    auto *first = static_cast<unsigned char *>(tensors[0].data_ptr());
    const size_t bytes = static_cast<size_t>(numel) * tensors[0].element_size();
    for (size_t i = 0; i < tensors.size(); i++) {
        const at::Tensor &t = tensors[i];
        if (!is_plain(t) || !t.is_alias_of(tensors[0]) || t.data_ptr() != first + i * bytes)
            return nullptr;
    }
    return first;
}

} // namespace spccl_torch
