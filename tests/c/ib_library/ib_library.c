/* ib_library.c - stands for libibverbs.so.1 in test_ib_library.c. TEST_IB_OLD: a version without ibv_wc_status_str.
 * TEST_IB_FORK: ibv_fork_init fails. Nothing but ibv_fork_init is called. */
int ibv_fork_init(void);
int ibv_fork_init(void)
{
#if defined(TEST_IB_FORK)
    return 22;
#else
    return 0;
#endif
}

/* Symbols that are only looked up. */
#define SYMBOL(name)                                                                                         \
    void ibv_##name(void);                                                                                   \
    void ibv_##name(void)                                                                                    \
    {                                                                                                        \
    }
SYMBOL(get_device_list)
SYMBOL(free_device_list)
SYMBOL(get_device_name)
SYMBOL(open_device)
SYMBOL(close_device)
SYMBOL(query_device)
SYMBOL(query_port)
SYMBOL(query_gid)
SYMBOL(alloc_pd)
SYMBOL(dealloc_pd)
SYMBOL(reg_mr)
SYMBOL(dereg_mr)
SYMBOL(create_comp_channel)
SYMBOL(destroy_comp_channel)
SYMBOL(create_cq)
SYMBOL(destroy_cq)
SYMBOL(get_cq_event)
SYMBOL(ack_cq_events)
SYMBOL(create_qp)
SYMBOL(modify_qp)
SYMBOL(destroy_qp)
SYMBOL(get_async_event)
SYMBOL(ack_async_event)
SYMBOL(event_type_str)
#if !defined(TEST_IB_OLD)
SYMBOL(wc_status_str)
#endif
