// SPDX-License-Identifier: Apache-2.0
// The part of XLA's FFI C API that a handler needs. tests/with_jax/jobs/test_declarations.py compares it with XLA's
// header. Each struct starts with its size, because later versions of XLA append members.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace farandole::xla {

// The API version for which this code is written. XLA refuses a handler whose version it does not support.
constexpr int kMajor = 0;
constexpr int kMinor = 1;

constexpr int kMetadataExtension = 1;
constexpr int kExecuteStage = 3;
constexpr int kBuffer = 1;  // the only kind of argument and of result
constexpr int kArrayAttribute = 1;
constexpr int kStringAttribute = 4;

enum class Code : int {
  kInvalidArgument = 3,
  kDeadlineExceeded = 4,
  kFailedPrecondition = 9,
  kInternal = 13,
  kUnavailable = 14,
};

using DataType = int;
constexpr DataType kInt32 = 4;
constexpr DataType kFloat64 = 12;
constexpr DataType kToken = 17;  // a value without data, whose only purpose is to order calls

struct Error;

struct Extension {
  size_t size;
  int type;
  Extension* next;
};

struct Version {
  size_t size;
  Extension* extensions;
  int major;
  int minor;
};

// If a call carries MetadataExtension, XLA only asks for the handler's version. The handler must then do nothing else.
struct Metadata {
  size_t size;
  Version version;
  uint32_t traits;
};
struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

struct ErrorArguments {
  size_t size;
  Extension* extensions;
  const char* message;
  Code code;
};

struct DestroyArguments {
  size_t size;
  Extension* extensions;
  Error* error;
};

struct StreamArguments {
  size_t size;
  Extension* extensions;
  void* context;
  void* stream;  // out: on CUDA, a CUstream
};

struct OrdinalArguments {
  size_t size;
  Extension* extensions;
  void* context;
  int ordinal;  // out: the driver's number of the device
};

struct Api {
  size_t size;
  Extension* extensions;
  Version version;
  void* internal;
  Error* (*create_error)(ErrorArguments* arguments);
  void (*message_of)(void* arguments);
  void (*destroy_error)(DestroyArguments* arguments);
  Error* (*register_handler)(void* arguments);
  Error* (*stream_of)(StreamArguments* arguments);
  void* not_ours[12];  // functions that farandole does not call
  Error* (*ordinal_of)(OrdinalArguments* arguments);
};

struct Buffer {
  size_t size;
  Extension* extensions;
  DataType type;
  void* data;
  int64_t ndim;
  int64_t* shape;
};

struct Values {
  size_t size;
  Extension* extensions;
  int64_t count;
  int* kinds;
  void** values;
};

struct Text {
  const char* first;
  size_t length;
  operator std::string_view() const { return {first, length}; }
};
struct Array {
  DataType type;
  size_t count;
  void* values;
};

struct Attributes {
  size_t size;
  Extension* extensions;
  int64_t count;
  int* kinds;
  Text** names;
  void** values;
};

struct CallFrame {
  size_t size;
  Extension* extensions;
  const Api* api;
  void* context;
  int stage;
  Values arguments;
  Values results;
  Attributes attributes;
};

// True if XLA's struct has all the members that are declared here.
template <class Struct>
bool has(const Struct& theirs) {
  return theirs.size >= sizeof(Struct);
}

}  // namespace farandole::xla
