/* The part of msgpack that WIRE.md asks for: a writer that always uses wide formats, a reader of every format. */
#ifndef MSGPACK_H
#define MSGPACK_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
  uint8_t bytes[16384];
  size_t size;
} Frame;

static void put(Frame *frame, const void *bytes, size_t size) {
  if (size > sizeof frame->bytes - frame->size) abort();
  if (size) memcpy(frame->bytes + frame->size, bytes, size);
  frame->size += size;
}

static void put_head(Frame *frame, uint8_t format, uint64_t number, int width) {
  put(frame, &format, 1);
  while (width-- > 0) put(frame, &(uint8_t){(uint8_t)(number >> 8 * width)}, 1);
}

static void put_map(Frame *frame, size_t count) { put_head(frame, 0xdf, count, 4); }
static void put_array(Frame *frame, size_t count) { put_head(frame, 0xdd, count, 4); }
static void put_int(Frame *frame, int64_t number) { put_head(frame, 0xd3, (uint64_t)number, 8); }

static void put_float(Frame *frame, double number) {
  uint64_t bits;
  memcpy(&bits, &number, 8);
  put_head(frame, 0xcb, bits, 8);
}

static void put_str(Frame *frame, const char *text) {
  put_head(frame, 0xdb, strlen(text), 4);
  put(frame, text, strlen(text));
}

static void put_bin(Frame *frame, const void *bytes, size_t size) {
  put_head(frame, 0xc6, size, 4);
  put(frame, bytes, size);
}

typedef enum { ABSENT, NUMBER, TEXT, BINARY, ARRAY, MAP, OTHER } Kind;

/* `size`: bytes of a TEXT or BINARY, items of an ARRAY, pairs of a MAP, which begin at `data`; `end`: of the frame. */
typedef struct {
  Kind kind;
  int64_t number;
  const uint8_t *data, *end;
  size_t size;
} Value;

/* Reads the value at `at`; returns where the next one begins, or NULL: cut short, too deep, or no msgpack. */
static const uint8_t *read_value(const uint8_t *at, const uint8_t *end, Value *value, int depth) {
  static const uint8_t widths[32] = {0, 0, 0, 0, 1, 2, 4, 1, 2, 4, 4, 8, 1, 2, 4, 8, /* 0xc0 to 0xcf */
                                     1, 2, 4, 8, 0, 0, 0, 0, 0, 1, 2, 4, 2, 4, 2, 4};
  if (at >= end || depth > 32) return NULL;
  uint8_t format = *at++;
  *value = (Value){OTHER, 0, at, end, 0};
  if (format < 0x80 || format >= 0xe0) {
    value->kind = NUMBER, value->number = (int8_t)format;
    return at;
  }
  if (format < 0xc0) {
    value->kind = format < 0x90 ? MAP : format < 0xa0 ? ARRAY : TEXT;
    value->size = format & (format < 0xa0 ? 0x0f : 0x1f);
  } else {
    size_t width = widths[format - 0xc0];
    if ((size_t)(end - at) < width || format == 0xc1 || (format >= 0xc7 && format <= 0xc9) ||
        (format >= 0xd4 && format <= 0xd8))
      return NULL; /* extensions are not on this wire */
    uint64_t number = 0;
    for (size_t n = 0; n < width; n++) number = number << 8 | *at++;
    if (format >= 0xd0 && format <= 0xd3 && width < 8 && number >> (8 * width - 1)) number |= ~UINT64_C(0) << 8 * width;
    value->kind = format < 0xc4    ? OTHER
                  : format < 0xc7  ? BINARY
                  : format < 0xcc  ? OTHER
                  : format < 0xd4  ? NUMBER
                  : format < 0xdc  ? TEXT
                  : format < 0xde  ? ARRAY
                                   : MAP;
    value->number = (int64_t)number;
    value->size = value->kind == OTHER || value->kind == NUMBER ? 0 : (size_t)number;
  }
  value->data = at;
  if (value->kind == TEXT || value->kind == BINARY) return (size_t)(end - at) < value->size ? NULL : at + value->size;
  if (value->kind == ARRAY || value->kind == MAP)
    for (size_t n = value->size * (value->kind == MAP ? 2 : 1); at && n > 0; n--)
      at = read_value(at, end, &(Value){0}, depth + 1);
  return at;
}

static int is_text(Value value, const char *text) {
  return value.kind == TEXT && value.size == strlen(text) && !memcmp(value.data, text, value.size);
}

/* Item `index` of an array; ABSENT where there is none. */
static Value item(Value array, size_t index) {
  Value found = {0};
  const uint8_t *at = array.data;
  if (array.kind != ARRAY || index >= array.size) return found;
  for (size_t n = 0; at && n <= index; n++) at = read_value(at, array.end, &found, 0);
  return found;
}

/* The value of a key; ABSENT where there is none, which stands for the field's default. */
static Value field(Value map, const char *key) {
  const uint8_t *at = map.data;
  for (size_t n = 0; map.kind == MAP && at && n < map.size; n++) {
    Value name, found;
    at = read_value(at, map.end, &name, 0);
    if (at) at = read_value(at, map.end, &found, 0);
    if (at && is_text(name, key)) return found;
  }
  return (Value){0};
}

#endif
