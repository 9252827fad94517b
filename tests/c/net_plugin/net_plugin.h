/* net_plugin.h - what the versions of the test plugin share: the calls without those parameters that differ. */
#ifndef NET_PLUGIN_H
#define NET_PLUGIN_H

#include <stddef.h>
#include <stdint.h>

typedef void (*logger)(int level, unsigned long flags, const char *file, int line, const char *fmt, ...);

extern int net_n_devices, net_speed, net_comms;
extern char net_name[40];
extern char net_device[16];

/* A line on stderr, and the result "invalid usage". */
int net_misuse(const char *text);
/* TEST_NET_END: this thread ends slowly. */
void net_end_slowly(void);
/* True if this call is to fail. Does not return if it is to hang. */
int net_faulty(const char *call);
/* A number of the environment. */
int net_number(const char *name, int otherwise);
int net_start(logger log);
int net_devices(int *n);
int net_listen_device(int dev, void *handle, void **out);
int net_connect_device(int dev, void *handle, void **out, void **device);
int net_accept_comm(void *listener, void **out, void **device);
int net_reg(void *comm, void *data, size_t bytes, int type, void **mr);
int net_dereg(void *comm, void *mr);
int net_send_any(void *comm, void *data, size_t bytes, int tag, void **request);
int net_receive_any(void *comm, int n, void *data, size_t bytes, int tag, void **request);
int net_test_any(void *request, int *done, int *size);
int net_close_send(void *comm);
int net_close_receive(void *comm);
int net_close_listen(void *listener);

#endif
