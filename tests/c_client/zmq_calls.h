/* The part of ZeroMQ's C interface that the client uses: pyzmq's wheels bring the library without its header. */
#ifndef ZMQ_CALLS_H
#define ZMQ_CALLS_H

#include <stddef.h>

enum { ZMQ_DEALER = 5, ZMQ_LINGER = 17, ZMQ_RECONNECT_IVL = 18, ZMQ_IMMEDIATE = 39 };
enum { ZMQ_DONTWAIT = 1, ZMQ_SNDMORE = 2, ZMQ_POLLIN = 1, ZMQ_POLLOUT = 2 };

typedef struct {
  void *socket;
  int fd;
  short events, revents;
} zmq_pollitem_t;

void *zmq_ctx_new(void);
int zmq_ctx_term(void *context);
void *zmq_socket(void *context, int type);
int zmq_close(void *socket);
int zmq_setsockopt(void *socket, int option, const void *value, size_t size);
int zmq_connect(void *socket, const char *endpoint);
int zmq_send(void *socket, const void *bytes, size_t size, int flags);
int zmq_recv(void *socket, void *bytes, size_t size, int flags);
int zmq_poll(zmq_pollitem_t *items, int count, long timeout_ms);

#endif
