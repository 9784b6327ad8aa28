// SPDX-License-Identifier: Apache-2.0
// The part of the C ABI that XLA calls. It runs a collective as one instruction of a compiled program.
//
// adapters/jax/program.py describes the call in attributes: "call" (numbers in the order of enum Head), "dtypes" (a
// farandole dtype for each tensor), "members" (the ranks of the set when the program was compiled), "factors" and
// "name". On a CPU, the handler blocks one of XLA's threads. This cannot deadlock: a token keeps the collectives of a
// program in the same order on all ranks, so all blocked ranks wait for the same call. On a GPU, the handler returns
// once the call is launched, and XLA's stream waits for the results.
#include "api/api.h"
#include "lib/os/memory.h"
#include "lib/xla/xla_ffi.h"

using namespace farandole;

namespace {

enum Head { kOp, kReduceOp, kRoot, kProcessSet, kOwnRank, kHeadLength };

// Duration of one wait, in seconds. A signal ends a wait early. The handler then waits again, because Python runs
// signal handlers only after XLA's program has ended.
constexpr double kSlice = 3600;

using Buffers = std::vector<const xla::Buffer*>;

[[noreturn]] void unreadable(const std::string& what) {
  throw Error(ErrorCode::kLibrary,
              "this version of XLA makes a call that farandole can't read: " + what);
}

// Returns all buffers except tokens, which have no bytes.
Buffers buffers_of(const xla::Values& values) {
  Buffers found;
  if (!has(values)) unreadable("it passes no buffers");
  for (int64_t i = 0; i < values.count; ++i) {
    const auto* buffer = static_cast<const xla::Buffer*>(values.values[i]);
    if (values.kinds[i] != xla::kBuffer || !has(*buffer))
      unreadable("it passes something other than buffers");
    if (buffer->type != xla::kToken) found.push_back(buffer);
  }
  return found;
}

const void* attribute(const xla::Attributes& all, std::string_view name, int kind) {
  for (int64_t i = 0; i < all.count; ++i) {
    if (*all.names[i] == name && all.kinds[i] == kind) return all.values[i];
  }
  unreadable("it lacks the attribute " + std::string(name));
}

template <class T>
std::span<const T> numbers(const xla::Attributes& all, std::string_view name, size_t least) {
  constexpr xla::DataType kType = std::is_same_v<T, double> ? xla::kFloat64 : xla::kInt32;
  const auto* array = static_cast<const xla::Array*>(attribute(all, name, xla::kArrayAttribute));
  if (array->type != kType || array->count < least)
    unreadable("wrong type or too few numbers in " + std::string(name));
  return {static_cast<const T*>(array->values), array->count};
}

// Throws unless rank and members are the same as when the program was compiled. A restart may change them.
void check_world(std::span<const int32_t> head, std::span<const int32_t> members) {
  const auto here = runtime();
  const std::vector<Rank> now = here->ranks_of(head[kProcessSet]);
  if (here->topology().rank == head[kOwnRank] && std::ranges::equal(now, members)) return;
  throw Error(
      ErrorCode::kInvalidArgument,
      "this program was compiled on rank " + std::to_string(head[kOwnRank]) + " for " +
          text_of_ranks({members.begin(), members.end()}) + ", but runs on rank " +
          std::to_string(here->topology().rank) + " with " + text_of_ranks(now) +
          ": the ranks have changed. Remedy: call jax.clear_caches(), or jit the function again");
}

// The device of the tensors, and the stream in which XLA produces the inputs and reads the results.
struct DeviceStream {
  int32_t device = kCpuDevice;
  uint64_t stream = 0;
};

using Locate = DeviceStream (*)(const xla::CallFrame&);

DeviceStream on_cpu(const xla::CallFrame&) { return {}; }

DeviceStream in_stream(const xla::CallFrame& frame) {
  xla::StreamArguments stream{sizeof stream, nullptr, frame.context, nullptr};
  xla::OrdinalArguments device{sizeof device, nullptr, frame.context, -1};
  xla::Error* error = frame.api->stream_of(&stream);
  if (!error) error = frame.api->ordinal_of(&device);
  if (!error) return {device.ordinal, reinterpret_cast<uint64_t>(stream.stream)};
  xla::DestroyArguments destroyed{sizeof destroyed, nullptr, error};
  frame.api->destroy_error(&destroyed);
  unreadable("it gives no stream or device");
}

struct ReleaseHandles {
  std::vector<Handle> all;
  ~ReleaseHandles() { farandole_release_all(all.data(), static_cast<int32_t>(all.size())); }
};

class XlaCall {
 public:
  XlaCall(const xla::CallFrame& frame)
      : inputs_(buffers_of(frame.arguments)),
        outputs_(buffers_of(frame.results)),
        head_(numbers<int32_t>(frame.attributes, "call", kHeadLength)),
        dtypes_(numbers<int32_t>(frame.attributes, "dtypes", inputs_.size())),
        members_(numbers<int32_t>(frame.attributes, "members", 1)),
        factors_(numbers<double>(frame.attributes, "factors", 2)),
        name_(*static_cast<const xla::Text*>(
            attribute(frame.attributes, "name", xla::kStringAttribute))) {
    if (inputs_.empty() || inputs_.size() != outputs_.size()) unreadable("it lacks a tensor");
    for (const xla::Buffer* buffer : inputs_)
      shapes_.push_back({buffer->shape, buffer->shape + buffer->ndim});
  }

  // Makes the call, and throws if the call fails. On a CPU, returns or throws only once the core no longer uses the
  // buffers. On a GPU, makes XLA's stream wait for that instead.
  void run(const xla::CallFrame& frame, Locate locate) {
    const std::shared_ptr<Runtime> here = runtime();
    CheckedCall call;
    try {
      check_world(head_, members_);
      where_ = locate(frame);
      call = here->prepare(requests(), inputs_.size());
    } catch (const Error& error) {
      farandole_refuse(requests().data(), static_cast<int32_t>(error.code()), error.what());
      throw;
    }
    for (size_t i = 0; i < outputs_.size() && !on_gpu(); ++i)
      prefer_huge_pages(outputs_[i]->data, bytes_of(i));
    ReleaseHandles handles{std::vector<Handle>(inputs_.size())};
    submit(*here, call, handles.all);
    Failure failure = waited(handles.all);
    if (on_gpu()) here->gpus().join_stream(handles.all, where_.stream);
    for (size_t i = 0; i < inputs_.size() && !failure; ++i) {
      here->handles().look(handles.all[i], [&](const Outcome& now) { failure = now.failure; });
      if (!failure) failure = taken(i, handles.all[i]);
    }
    if (failure) throw Error(failure.code, failure.text);
  }

 private:
  bool on_gpu() const { return where_.device != kCpuDevice; }

  // True if the size of the result is known before the call. The core then writes directly into XLA's buffer.
  bool direct() const { return !traits_of(static_cast<Op>(head_[kOp])).ragged(); }

  // Waits for all handles, even if a call fails. Returns the first failure.
  static Failure waited(const std::vector<Handle>& handles) {
    Failure first;
    for (Handle handle : handles) {
      int32_t code;
      do {
        code = farandole_wait(&handle, 1, kSlice);
      } while (code == FARANDOLE_PENDING);
      if (code != FARANDOLE_OK && !first) first = {last_code, last_error};
    }
    return first;
  }

  void submit(Runtime& here, const CheckedCall& call, std::vector<Handle>& handles) const {
    static double no_elements;  // replaces XLA's pointer, which may be null for an empty tensor
    const auto address = [](void* data) {
      return reinterpret_cast<uintptr_t>(data ? data : &no_elements);
    };
    std::vector<uintptr_t> inputs, outputs;
    for (const xla::Buffer* buffer : inputs_) inputs.push_back(address(buffer->data));
    for (const xla::Buffer* buffer : outputs_)
      outputs.push_back(direct() ? address(buffer->data) : 0);
    const std::vector<uint64_t> streams(inputs_.size(), where_.stream);
    PreparedSubmission one{&call, inputs, outputs, streams, handles};
    here.submit({&one, 1});
  }

  std::vector<farandole_request> requests() const {
    std::vector<farandole_request> made;
    for (size_t i = 0; i < inputs_.size(); ++i) made.push_back(request(i));
    return made;
  }

  farandole_request request(size_t i) const {
    farandole_request made{};
    made.op = head_[kOp];
    made.reduce_op = head_[kReduceOp];
    made.dtype = dtypes_[i];
    made.device = where_.device;
    made.root = head_[kRoot];
    made.process_set = head_[kProcessSet];
    made.prescale = factors_[0];
    made.postscale = factors_[1];
    made.ndim = static_cast<int32_t>(shapes_[i].size());
    made.shape = shapes_[i].data();
    made.input = this;  // any address that is not null, to show that this rank has an input
    made.name = name_.c_str();
    return made;
  }

  // Explains why the shape of a result may differ from the program's shape, and how to avoid the difference.
  std::string remedy(const farandole_result& result) const {
    std::vector<Rank> without;
    for (int32_t m = 0; m < result.n_received; ++m) {
      if (result.received[m] == 0) without.push_back(members_[static_cast<size_t>(m)]);
    }
    if (without.empty()) {
      return ": within jit, all ranks must bring equal shapes; pad them, or make the call outside";
    }
    return ", because " + text_of_ranks(without) +
           " sent no rows: a joined rank has none. Make the call outside of jit, or before any "
           "rank calls join()";
  }

  // Copies a result that the core allocated into XLA's buffer. Fails if the program was compiled for a different shape.
  Failure taken(size_t i, Handle handle) const {
    if (direct()) return {};
    const xla::Buffer& output = *outputs_[i];
    farandole_result result;
    if (farandole_result_of(handle, &result)) return {last_code, last_error};
    const std::span shape(result.shape, static_cast<size_t>(result.ndim));
    if (!std::ranges::equal(shape, std::span(output.shape, static_cast<size_t>(output.ndim)))) {
      return {ErrorCode::kMismatch, std::string(name_of(static_cast<Op>(head_[kOp]))) + " '" +
                                        name_ + "': rank " + std::to_string(head_[kOwnRank]) +
                                        " gets shape " + text_of(shape) + ", but its program has " +
                                        text_of({output.shape, static_cast<size_t>(output.ndim)}) +
                                        remedy(result)};
    }
    if (bytes_of(i) == 0) return {};
    if (!on_gpu()) {
      std::memcpy(output.data, result.output, bytes_of(i));
      return {};
    }
    const auto free = [this](void* memory) { farandole_free_on(memory, where_.stream); };
    const std::unique_ptr<void, decltype(free)> memory(farandole_take(handle), free);
    if (!memory) return {last_code, last_error};
    copy(output.data, memory.get(), bytes_of(i));
    return {};
  }

  // Copies between GPU addresses. The copy runs in the order of XLA's stream.
  void copy(void* target, const void* source, size_t bytes) const {
    const auto device = runtime()->gpus().open(where_.device);
    const GpuDevice::Scope scope(*device);
    const auto address = [](const void* p) { return reinterpret_cast<cuda::Address>(p); };
    device->api().check(device->api().copy_async(address(target), address(source), bytes,
                                                 reinterpret_cast<cuda::Stream>(where_.stream)),
                        "copying a result");
  }

  size_t bytes_of(size_t i) const {
    size_t bytes = size_of(static_cast<DType>(dtypes_[i]));
    for (int64_t axis = 0; axis < outputs_[i]->ndim; ++axis)
      bytes *= static_cast<size_t>(outputs_[i]->shape[axis]);
    return bytes;
  }

  DeviceStream where_;
  const Buffers inputs_, outputs_;
  const std::span<const int32_t> head_, dtypes_, members_;
  const std::span<const double> factors_;
  const std::string name_;
  std::vector<std::vector<int64_t>> shapes_;
};

// The XLA error code that is nearest to an error of farandole, and the error's Python class, which the text names.
struct XlaError {
  const char* name;
  xla::Code code;
};
XlaError xla_error(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument: return {"ValueError", xla::Code::kInvalidArgument};
    case ErrorCode::kWrongType: return {"TypeError", xla::Code::kInvalidArgument};
    case ErrorCode::kMismatch: return {"MismatchError", xla::Code::kFailedPrecondition};
    case ErrorCode::kPeer: return {"PeerError", xla::Code::kUnavailable};
    case ErrorCode::kStall: return {"StallError", xla::Code::kDeadlineExceeded};
    case ErrorCode::kShutdown: return {"ShutdownError", xla::Code::kFailedPrecondition};
    case ErrorCode::kLibrary: return {"LibraryError", xla::Code::kInternal};
    default: return {"FarandoleError", xla::Code::kInternal};
  }
}

// If XLA asks for the handler's version, answers and returns true. The answer contains XLA's minor version, because XLA
// may accept no other. That is safe: within a major version, structs only grow at their ends.
bool answered(const xla::CallFrame& frame) {
  for (xla::Extension* each = frame.extensions; each != nullptr; each = each->next) {
    if (each->type != xla::kMetadataExtension) continue;
    xla::Metadata& metadata = *reinterpret_cast<xla::MetadataExtension*>(each)->metadata;
    const bool known = frame.api && has(*frame.api) && frame.api->version.major == xla::kMajor;
    metadata.version.major = xla::kMajor;
    metadata.version.minor = known ? frame.api->version.minor : xla::kMinor;
    return true;
  }
  return false;
}

xla::Error* run(void* call_frame, Locate locate) {
  const auto& frame = *static_cast<const xla::CallFrame*>(call_frame);
  xla_may_call = true;
  if (answered(frame) || frame.stage != xla::kExecuteStage) return nullptr;
  const int32_t code = guarded([&] {
    if (!has(frame) || !has(*frame.api)) unreadable("it is shorter than that of version 0.1");
    if (frame.api->version.major != xla::kMajor) {
      unreadable("its version is " + std::to_string(frame.api->version.major));
    }
    XlaCall(frame).run(frame, locate);
  });
  if (code == FARANDOLE_OK) return nullptr;
  const XlaError error = xla_error(static_cast<ErrorCode>(code));
  const std::string text = std::string("farandole.") + error.name + ": " + last_error;
  xla::ErrorArguments arguments{sizeof arguments, nullptr, text.c_str(), error.code};
  return frame.api->create_error(&arguments);
}

}  // namespace

FARANDOLE_API void* farandole_xla_collective(void* call_frame) { return run(call_frame, on_cpu); }

FARANDOLE_API void* farandole_xla_collective_on(void* call_frame) {
  return run(call_frame, in_stream);
}
