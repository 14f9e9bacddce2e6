/* An engine in C that knows of the daemon only what ipc/WIRE.md says.

   client DIRECTORY story    capture, look up, restore, copy; every byte is compared
   client DIRECTORY trials   what must be refused, then the story on the same link
   client DIRECTORY hold     one capture, then a second one under way, until it is killed or the daemon is gone

   DIRECTORY holds the sockets of an instance. Exit status 0: all was right; else the step that failed and the daemon's
   code are printed. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "msgpack.h"
#include "zmq_calls.h"

enum { VERSION = 2, WAIT_MS = 30000, LAST_MS = 200 };
enum { TOKENS = 600, ROWS = 1024, PLANE_1 = 65536, POOL_BYTES = 147456 };

/* Planes as WIRE.md has them: one dense, one with gaps between its rows. */
static const struct { size_t offset, row, stride; } planes[] = {{0, 64, 64}, {PLANE_1, 48, 80}};
typedef struct { uint32_t first, count; } Run;

static const char *step = "start";

typedef struct {
  void *context, *socket;
  int life;
  uint8_t token[16], start_id[16];
  int64_t seq, chunk_tokens, engine;
  uint8_t bytes[65536]; /* of the last reply */
} Client;

static _Noreturn __attribute__((format(printf, 1, 2))) void fail(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  fprintf(stderr, "%s: ", step);
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  va_end(arguments);
  exit(1);
}

static void check(int good, const char *what) {
  if (!good) fail("%s (errno %d)", what, errno);
}

/* --- lifeline and link ------------------------------------------------------------------------------------------- */

static void connect_lifeline(Client *client, const char *directory) {
  step = "lifeline";
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  int length = snprintf(address.sun_path, sizeof address.sun_path, "%s/life.sock", directory);
  check(length > 0 && (size_t)length < sizeof address.sun_path, "the path is too long");
  client->life = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  check(!connect(client->life, (struct sockaddr *)&address, sizeof address), "nobody listens");
  uint8_t packet[256];
  ssize_t size = recv(client->life, packet, sizeof packet, 0);
  check(size > 0, "no token came");
  Value map;
  check(read_value(packet, packet + size, &map, 0) == packet + size, "the packet is no msgpack");
  Value token = field(map, "token"), start_id = field(map, "start_id");
  check(token.kind == BINARY && token.size == 16 && start_id.kind == BINARY && start_id.size == 16, "no token");
  memcpy(client->token, token.data, 16);
  memcpy(client->start_id, start_id.data, 16);
}

static void send_packet(Client *client, uint64_t tag, int descriptor) {
  uint8_t packet[8];
  for (int n = 0; n < 8; n++) packet[n] = (uint8_t)(tag >> 8 * n);
  union { struct cmsghdr head; char bytes[CMSG_SPACE(sizeof(int))]; } control = {0};
  struct msghdr message = {.msg_iov = &(struct iovec){packet, 8}, .msg_iovlen = 1};
  if (descriptor >= 0) {
    message.msg_control = control.bytes, message.msg_controllen = sizeof control.bytes;
    control.head = (struct cmsghdr){CMSG_LEN(sizeof(int)), SOL_SOCKET, SCM_RIGHTS};
    memcpy(CMSG_DATA(&control.head), &descriptor, sizeof(int));
  }
  check(sendmsg(client->life, &message, MSG_NOSIGNAL) == 8, "the lifeline does not take a packet");
}

static void await_end(Client *client) {
  check(poll(&(struct pollfd){client->life, POLLIN, 0}, 1, WAIT_MS) == 1, "the lifeline has not ended");
  check(recv(client->life, &(char){0}, 1, 0) <= 0, "the lifeline carries something");
}

static void connect_link(Client *client, const char *directory) {
  step = "link";
  char endpoint[160];
  check((size_t)snprintf(endpoint, sizeof endpoint, "ipc://%s/client.sock", directory) < sizeof endpoint, "too long");
  client->context = zmq_ctx_new();
  client->socket = zmq_socket(client->context, ZMQ_DEALER);
  int options[][2] = {{ZMQ_LINGER, 200}, {ZMQ_RECONNECT_IVL, -1}, {ZMQ_IMMEDIATE, 1}};
  for (int n = 0; n < 3; n++)
    check(!zmq_setsockopt(client->socket, options[n][0], &options[n][1], sizeof(int)), "an option is refused");
  check(!zmq_connect(client->socket, endpoint), "no connection");
  check(zmq_poll(&(zmq_pollitem_t){client->socket, 0, ZMQ_POLLOUT, 0}, 1, WAIT_MS) == 1, "nobody listens");
}

static void disconnect(Client *client) {
  zmq_close(client->socket);
  zmq_ctx_term(client->context);
  close(client->life);
}

/* --- requests and replies ---------------------------------------------------------------------------------------- */

static void key(Frame *frame, const char *name) { put_str(frame, name); }
static void with_int(Frame *frame, const char *name, int64_t number) { key(frame, name), put_int(frame, number); }
static void with_str(Frame *frame, const char *name, const char *text) { key(frame, name), put_str(frame, text); }
static void with_bin(Frame *frame, const char *name, const void *bytes, size_t size) {
  key(frame, name), put_bin(frame, bytes, size);
}

/* The rows of one group, once for all stages. This host is taken to be little-endian, as the wire is. */
static void with_rows(Frame *frame, const char *name, const Run *runs, size_t count) {
  key(frame, name), put_array(frame, 1), put_array(frame, 1), put_bin(frame, runs, count * sizeof(Run));
}

/* A request with `fields` more fields to come. */
static void begin(Client *client, Frame *frame, const char *type, size_t fields) {
  step = type;
  frame->size = 0;
  put_map(frame, fields + 2);
  with_str(frame, "t", type);
  with_int(frame, "seq", ++client->seq);
}

static void send_frame(Client *client, const Frame *frame, int flags) {
  check(zmq_send(client->socket, frame->bytes, frame->size, flags | ZMQ_DONTWAIT) >= 0, "the link takes nothing");
}

/* The final reply to request `seq`. */
static Value await(Client *client, int64_t seq) {
  for (;;) {
    zmq_pollitem_t items[] = {{client->socket, 0, ZMQ_POLLIN, 0}, {NULL, client->life, POLLIN, 0}};
    check(zmq_poll(items, 2, WAIT_MS) > 0, "no reply came");
    if (items[1].revents) zmq_poll(items, 1, LAST_MS); /* the end may overtake the last reply */
    int size = zmq_recv(client->socket, client->bytes, sizeof client->bytes, ZMQ_DONTWAIT);
    if (size < 0 && items[1].revents) fail("the lifeline ended");
    if (size < 0) continue;
    Value reply;
    check((size_t)size <= sizeof client->bytes, "the reply is too long");
    check(read_value(client->bytes, client->bytes + size, &reply, 0) == client->bytes + size, "no msgpack came");
    int unasked = is_text(field(reply, "t"), "workers_changed") || is_text(field(reply, "t"), "progress");
    if (!unasked && field(reply, "seq").number == seq) return reply;
  }
}

static Value ask(Client *client, const Frame *frame, const char *expected) {
  send_frame(client, frame, 0);
  Value reply = await(client, client->seq);
  Value code = field(reply, "code"), message = field(reply, "message");
  if (is_text(field(reply, "t"), "failed"))
    fail("failed with %.*s: %.*s", (int)code.size, code.data, (int)message.size, message.data);
  check(is_text(field(reply, "t"), expected), "an unexpected reply");
  return reply;
}

/* The request that was sent must be refused with this code. */
static void refused(Client *client, int64_t seq, const char *expected) {
  Value reply = await(client, seq), code = field(reply, "code");
  if (!is_text(field(reply, "t"), "failed")) fail("was not refused, expected %s", expected);
  if (!is_text(code, expected)) fail("refused with %.*s, expected %s", (int)code.size, code.data, expected);
  printf("%s refused: %s\n", step, expected);
}

static void ask_refused(Client *client, const Frame *frame, const char *expected) {
  send_frame(client, frame, 0);
  refused(client, client->seq, expected);
}

static void greet(Client *client, Frame *frame, int version) {
  begin(client, frame, "hello", 3);
  with_int(frame, "version", version);
  with_bin(frame, "token", client->token, 16);
  with_str(frame, "client", "c");
}

static void open_client(Client *client, const char *directory) {
  Frame frame;
  connect_lifeline(client, directory);
  connect_link(client, directory);
  greet(client, &frame, VERSION);
  Value welcome = ask(client, &frame, "welcome"), start_id = field(welcome, "start_id");
  check(field(welcome, "version").number == VERSION, "the daemon speaks another version");
  check(start_id.size == 16 && !memcmp(start_id.data, client->start_id, 16), "another daemon");
  client->chunk_tokens = field(welcome, "chunk_tokens").number;
}

/* --- the engine -------------------------------------------------------------------------------------------------- */

static int make_pool(uint8_t **bytes, int seals) {
  step = "pool";
  int descriptor = memfd_create("c-engine", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  check(descriptor >= 0 && !posix_fallocate(descriptor, 0, POOL_BYTES), "no memory");
  check(!fcntl(descriptor, F_ADD_SEALS, seals), "no seals");
  *bytes = mmap(NULL, POOL_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  check(*bytes != MAP_FAILED, "no mapping");
  for (uint32_t n = 0; n < POOL_BYTES; n++) (*bytes)[n] = (uint8_t)(n * UINT32_C(2654435761) >> 24);
  return descriptor;
}

/* `probe`: the bytes at offsets 0 and PLANE_1 of the pool. */
static void put_register(Client *client, Frame *frame, int64_t tag, const uint8_t *probe) {
  static const char *names[] = {"model", "revision", "dtype", "kv_format", "engine_build"};
  begin(client, frame, "register", 4);
  with_str(frame, "namespace", "c"), with_str(frame, "engine", "c engine");
  key(frame, "fingerprint"), put_map(frame, 5);
  for (int n = 0; n < 5; n++) with_str(frame, names[n], "c-1");
  key(frame, "stages"), put_array(frame, 1), put_map(frame, 6);
  with_int(frame, "index", 0), with_str(frame, "device", "cpu:0");
  key(frame, "pool"), put_map(frame, 3);
  with_str(frame, "t", "memfd"), with_int(frame, "descriptor", tag), with_int(frame, "pool_bytes", POOL_BYTES);
  key(frame, "layout"), put_array(frame, 3);
  put_array(frame, 1), put_array(frame, 1), put_array(frame, 2); /* one group, of it the planes alone */
  for (int n = 0; n < 2; n++) {
    put_array(frame, 4);
    put_int(frame, (int64_t)planes[n].offset), put_int(frame, (int64_t)planes[n].row);
    put_int(frame, (int64_t)planes[n].stride), put_int(frame, ROWS);
  }
  put_array(frame, 0), put_int(frame, client->chunk_tokens);
  with_bin(frame, "probe_offsets", (uint8_t[16]){[10] = PLANE_1 >> 16}, 16);
  with_bin(frame, "probe_bytes", probe, 32);
}

static void register_engine(Client *client, int descriptor, const uint8_t *bytes, int64_t tag) {
  Frame frame;
  uint8_t probe[32];
  memcpy(probe, bytes, 16), memcpy(probe + 16, bytes + PLANE_1, 16);
  put_register(client, &frame, tag, probe);
  send_packet(client, (uint64_t)tag, descriptor);
  Value registered = ask(client, &frame, "registered"), worker = item(field(registered, "workers"), 0);
  check(field(worker, "pid").number > 0 && field(worker, "start_ticks").number > 0, "no worker is named");
  client->engine = field(registered, "engine_id").number;
}

static void put_capture(Client *client, Frame *frame, const char *conversation, const Run *runs, size_t count) {
  uint32_t tokens[TOKENS];
  for (uint32_t n = 0; n < TOKENS; n++) tokens[n] = 7 * n + 3;
  begin(client, frame, "capture", 7);
  with_int(frame, "engine_id", client->engine), with_str(frame, "conversation", conversation);
  with_bin(frame, "tokens", tokens, sizeof tokens);
  with_rows(frame, "rows", runs, count);
  with_int(frame, "slot", 0), with_str(frame, "ordered", "host");
  key(frame, "deadline_s"), put_float(frame, 20.0);
}

static void put_restore(Client *client, Frame *frame, const char *conversation, const Run *runs, size_t count) {
  begin(client, frame, "restore", 5);
  with_int(frame, "engine_id", client->engine), with_str(frame, "conversation", conversation);
  with_rows(frame, "rows", runs, count);
  with_int(frame, "slot", 1), with_str(frame, "ordered", "host");
}

static uint32_t row_of(const Run *runs, uint32_t token) {
  while (token >= runs->count) token -= runs++->count;
  return runs->first + token;
}

/* What the pool should hold after rows of `from` went to rows of `model`. */
static void model_copy(uint8_t *model, const Run *to, const uint8_t *from, const Run *runs, uint32_t tokens) {
  for (uint32_t token = 0; token < tokens; token++)
    for (int n = 0; n < 2; n++)
      memcpy(model + planes[n].offset + row_of(to, token) * planes[n].stride,
             from + planes[n].offset + row_of(runs, token) * planes[n].stride, planes[n].row);
}

static void compare(const uint8_t *bytes, const uint8_t *model) {
  for (size_t n = 0; n < POOL_BYTES; n++)
    if (bytes[n] != model[n]) fail("byte %zu is %02x, expected %02x", n, bytes[n], model[n]);
}

static const Run source[] = {{400, 300}, {100, 300}}, target[] = {{724, 300}, {0, 100}, {200, 200}};
static const Run copied[] = {{724, 200}}, copy[] = {{100, 100}, {500, 100}};

static void story(Client *client, uint8_t *bytes) {
  static uint8_t before[POOL_BYTES], model[POOL_BYTES];
  Frame frame;
  memcpy(before, bytes, POOL_BYTES);
  put_capture(client, &frame, "talk", source, 2);
  Value reply = ask(client, &frame, "captured");
  int64_t image_id = field(reply, "image_id").number;
  check(field(reply, "tokens").number == TOKENS, "another number of tokens was captured");
  check(is_text(field(item(field(reply, "stages"), 0), "state"), "done"), "the stage is not done");

  for (uint32_t token = 0; token < TOKENS; token++)
    for (int n = 0; n < 2; n++)
      memset(bytes + planes[n].offset + row_of(source, token) * planes[n].stride, 0xee, planes[n].row);
  memcpy(model, bytes, POOL_BYTES);

  uint32_t asked[TOKENS + 5];
  for (uint32_t n = 0; n < TOKENS + 5; n++) asked[n] = 7 * n + 3;
  begin(client, &frame, "lookup", 2);
  with_int(&frame, "engine_id", client->engine), with_bin(&frame, "tokens", asked, sizeof asked);
  reply = ask(client, &frame, "found");
  check(is_text(field(reply, "match"), "hit") && field(reply, "image_id").number == image_id, "no hit");
  check(is_text(field(reply, "conversation"), "talk") && field(reply, "tokens").number == TOKENS, "another image");

  put_restore(client, &frame, "talk", target, 3);
  reply = ask(client, &frame, "restored");
  check(field(reply, "tokens").number == TOKENS, "another number of tokens was restored");
  model_copy(model, target, before, source, TOKENS);
  compare(bytes, model);

  begin(client, &frame, "slot_direct", 7);
  with_int(&frame, "engine_id", client->engine), with_int(&frame, "tokens", 200);
  with_rows(&frame, "rows", copied, 1), with_rows(&frame, "target_rows", copy, 2);
  with_int(&frame, "slot", 1), with_int(&frame, "target_slot", 2), with_str(&frame, "ordered", "host");
  reply = ask(client, &frame, "copied");
  check(field(reply, "tokens").number == 200, "another number of tokens was copied");
  memcpy(before, model, POOL_BYTES);
  model_copy(model, copy, before, copied, 200);
  compare(bytes, model);

  begin(client, &frame, "unregister", 1);
  with_int(&frame, "engine_id", client->engine);
  ask(client, &frame, "done");
  begin(client, &frame, "goodbye", 0);
  ask(client, &frame, "done");
  await_end(client);
  printf("all right: image %lld\n", (long long)image_id);
}

/* --- what must be refused ---------------------------------------------------------------------------------------- */

static void try_strangers(const char *directory) {
  Client client = {0};
  Frame frame;
  connect_lifeline(&client, directory), connect_link(&client, directory);
  begin(&client, &frame, "stats", 0);
  ask_refused(&client, &frame, "hello_first");
  greet(&client, &frame, VERSION + 1);
  step = "wrong version";
  ask_refused(&client, &frame, "wrong_version");
  await_end(&client);
  disconnect(&client);

  client = (Client){0};
  open_client(&client, directory);
  step = "packet without a descriptor";
  send_packet(&client, 1, -1);
  await_end(&client);
  printf("%s: dropped\n", step);
  disconnect(&client);
}

static void try_frames(Client *client) {
  Frame frame;
  begin(client, &frame, "stats", 0);
  frame.size--;
  step = "truncated frame";
  send_frame(client, &frame, 0), refused(client, -1, "bad_frame");
  begin(client, &frame, "stats", 0);
  step = "two frames";
  send_frame(client, &frame, ZMQ_SNDMORE), send_frame(client, &frame, 0), refused(client, -1, "bad_frame");
  begin(client, &frame, "dance", 0), ask_refused(client, &frame, "unknown_op");
  begin(client, &frame, "lookup", 1), with_int(&frame, "engine_id", 1);
  step = "missing field";
  ask_refused(client, &frame, "bad_request");
  begin(client, &frame, "unregister", 1), with_int(&frame, "engine_id", 99);
  ask_refused(client, &frame, "not_registered");
}

static void try_pools(Client *client, int descriptor) {
  Frame frame;
  static const uint8_t nothing[32];
  uint8_t *bytes;
  put_register(client, &frame, 70, nothing);
  step = "descriptor never sent";
  ask_refused(client, &frame, "unshareable");
  int unsealed = make_pool(&bytes, 0);
  put_register(client, &frame, 71, nothing);
  step = "unsealed pool";
  send_packet(client, 71, unsealed), ask_refused(client, &frame, "unshareable");
  munmap(bytes, POOL_BYTES), close(unsealed);
  put_register(client, &frame, 72, nothing);
  step = "wrong probe";
  send_packet(client, 72, descriptor), ask_refused(client, &frame, "probe_failed");
}

static void try_rows(Client *client) {
  static const struct { const char *step; Run runs[2]; } trials[] = {
      {"rows out of range", {{400, 300}, {ROWS - 299, 300}}},
      {"rows twice", {{400, 300}, {699, 300}}},
      {"too few rows", {{400, 300}, {100, 299}}},
      {"an empty run", {{400, 600}, {100, 0}}},
  };
  Frame frame;
  for (size_t n = 0; n < sizeof trials / sizeof *trials; n++) {
    put_capture(client, &frame, "never", trials[n].runs, 2);
    step = trials[n].step;
    ask_refused(client, &frame, "bad_rows");
  }
  put_restore(client, &frame, "never", target, 3);
  step = "no such image";
  ask_refused(client, &frame, "unknown_conversation");
}

/* --- main -------------------------------------------------------------------------------------------------------- */

int main(int count, char **arguments) {
  if (count != 3) return 2;
  const char *directory = arguments[1], *mode = arguments[2];
  int trials = !strcmp(mode, "trials");
  setvbuf(stdout, NULL, _IOLBF, 0);
  Client client = {0};
  Frame frame;
  uint8_t *bytes;
  int descriptor = make_pool(&bytes, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  if (trials) try_strangers(directory);
  open_client(&client, directory);
  if (trials) try_frames(&client), try_pools(&client, descriptor);
  register_engine(&client, descriptor, bytes, 1);
  if (trials) try_rows(&client);
  if (!strcmp(mode, "hold")) {
    put_capture(&client, &frame, "kept", source, 2);
    ask(&client, &frame, "captured");
    put_capture(&client, &frame, "torn", source, 2);
    send_frame(&client, &frame, 0);
    puts("capturing");
    await(&client, client.seq);
    pause();
  }
  story(&client, bytes);
  disconnect(&client);
  munmap(bytes, POOL_BYTES), close(descriptor);
  return 0;
}
