// SPDX-License-Identifier: Apache-2.0
// Compiled, never run: our declarations of XLA's FFI beside its xla/ffi/api/c_api.h.
#include "lib/xla/xla_ffi.h"

#include <xla/ffi/api/c_api.h>

#include <type_traits>

namespace xla = farandole::xla;

static_assert(xla::kMajor == XLA_FFI_API_MAJOR && xla::kMinor <= XLA_FFI_API_MINOR);
static_assert(xla::kMetadataExtension == XLA_FFI_Extension_Metadata);
static_assert(xla::kExecuteStage == XLA_FFI_ExecutionStage_EXECUTE);
static_assert(xla::kBuffer == XLA_FFI_ArgType_BUFFER && xla::kBuffer == XLA_FFI_RetType_BUFFER);
static_assert(xla::kArrayAttribute == XLA_FFI_AttrType_ARRAY);
static_assert(xla::kStringAttribute == XLA_FFI_AttrType_STRING);
static_assert(xla::kInt32 == XLA_FFI_DataType_S32 && xla::kFloat64 == XLA_FFI_DataType_F64);
static_assert(xla::kToken == XLA_FFI_DataType_TOKEN);
static_assert(static_cast<int>(xla::Code::kInvalidArgument) == XLA_FFI_Error_Code_INVALID_ARGUMENT);
static_assert(static_cast<int>(xla::Code::kDeadlineExceeded) ==
              XLA_FFI_Error_Code_DEADLINE_EXCEEDED);
static_assert(static_cast<int>(xla::Code::kFailedPrecondition) ==
              XLA_FFI_Error_Code_FAILED_PRECONDITION);
static_assert(static_cast<int>(xla::Code::kInternal) == XLA_FFI_Error_Code_INTERNAL);
static_assert(static_cast<int>(xla::Code::kUnavailable) == XLA_FFI_Error_Code_UNAVAILABLE);

#define SAME(ours, member, theirs, other)                                 \
  static_assert(offsetof(xla::ours, member) == offsetof(theirs, other) && \
                sizeof(xla::ours::member) == sizeof(theirs::other))
using TheirExtension =  // its name differs between versions
    std::remove_pointer_t<decltype(XLA_FFI_CallFrame::extension_start)>;
SAME(Extension, size, TheirExtension, struct_size);
SAME(Extension, type, TheirExtension, type);
SAME(Extension, next, TheirExtension, next);
SAME(Version, major, XLA_FFI_Api_Version, major_version);
SAME(Version, minor, XLA_FFI_Api_Version, minor_version);
SAME(Metadata, version, XLA_FFI_Metadata, api_version);
SAME(MetadataExtension, metadata, XLA_FFI_Metadata_Extension, metadata);
SAME(ErrorArguments, message, XLA_FFI_Error_Create_Args, message);
SAME(ErrorArguments, code, XLA_FFI_Error_Create_Args, errc);
SAME(Api, version, XLA_FFI_Api, api_version);
SAME(Api, create_error, XLA_FFI_Api, XLA_FFI_Error_Create);
SAME(Api, destroy_error, XLA_FFI_Api, XLA_FFI_Error_Destroy);
SAME(Api, stream_of, XLA_FFI_Api, XLA_FFI_Stream_Get);
SAME(Api, ordinal_of, XLA_FFI_Api, XLA_FFI_DeviceOrdinal_Get);
SAME(OrdinalArguments, context, XLA_FFI_DeviceOrdinal_Get_Args, ctx);
SAME(OrdinalArguments, ordinal, XLA_FFI_DeviceOrdinal_Get_Args, device_ordinal);
SAME(DestroyArguments, error, XLA_FFI_Error_Destroy_Args, error);
SAME(StreamArguments, context, XLA_FFI_Stream_Get_Args, ctx);
SAME(StreamArguments, stream, XLA_FFI_Stream_Get_Args, stream);
SAME(CallFrame, context, XLA_FFI_CallFrame, ctx);
SAME(Buffer, type, XLA_FFI_Buffer, dtype);
SAME(Buffer, data, XLA_FFI_Buffer, data);
SAME(Buffer, ndim, XLA_FFI_Buffer, rank);
SAME(Buffer, shape, XLA_FFI_Buffer, dims);
SAME(Values, count, XLA_FFI_Args, size);
SAME(Values, kinds, XLA_FFI_Args, types);
SAME(Values, values, XLA_FFI_Args, args);
SAME(Values, values, XLA_FFI_Rets, rets);
SAME(Text, first, XLA_FFI_ByteSpan, ptr);
SAME(Text, length, XLA_FFI_ByteSpan, len);
SAME(Array, type, XLA_FFI_Array, dtype);
SAME(Array, count, XLA_FFI_Array, size);
SAME(Array, values, XLA_FFI_Array, data);
SAME(Attributes, count, XLA_FFI_Attrs, size);
SAME(Attributes, kinds, XLA_FFI_Attrs, types);
SAME(Attributes, names, XLA_FFI_Attrs, names);
SAME(Attributes, values, XLA_FFI_Attrs, attrs);
SAME(CallFrame, extensions, XLA_FFI_CallFrame, extension_start);
SAME(CallFrame, api, XLA_FFI_CallFrame, api);
SAME(CallFrame, stage, XLA_FFI_CallFrame, stage);
SAME(CallFrame, arguments, XLA_FFI_CallFrame, args);
SAME(CallFrame, results, XLA_FFI_CallFrame, rets);
SAME(CallFrame, attributes, XLA_FFI_CallFrame, attrs);
