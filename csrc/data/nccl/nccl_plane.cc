// SPDX-License-Identifier: Apache-2.0
#include "data/nccl/nccl_plane.h"

#include <cstring>
#include <set>
#include <utility>

#include "base/error.h"
#include "kernels/kernels.h"

namespace farandole {

NcclPlane::NcclPlane(const GpuMover& mover, const GpuWindows& windows, SetId set,
                     NcclCommunicator::Setup setup)
    : GpuPlane(setup.device),
      mover_(mover),
      windows_(windows),
      set_(set),
      api_(setup.api),
      communicator_(setup),
      plan_(setup.member, setup.members, &windows) {}

bool NcclPlane::supports(const Signature& signature) const {
  if (signature.device == kCpuDevice) return false;
  const CollectiveTraits& traits = signature.traits();
  return traits.pattern != Pattern::kNone &&
         (!traits.reduces() || (kernels::supports(signature.dtype, signature.reduce_op) &&
                                traits_of(signature.dtype).reduces_on_gpus()));
}

void NcclPlane::begin(std::span<const Part> parts) {
  parts_ = parts;
  known_ = launched_ = false;
}

bool NcclPlane::ready() const { return communicator_.ready() || communicator_.failed(); }

// The host waits for nothing but the communicator. A first launch may have to connect: then NCCL's kernel
// comes into the stream later, and what must follow it waits for ready().
Progress NcclPlane::step() {
  communicator_.check();
  if (!communicator_.ready()) return Progress::kWaiting;
  GpuDevice::Scope scope(*device_);
  if (!known_) {
    look_up_windows();
    known_ = true;
    if (!communicator_.ready()) return Progress::kMoved;
  }
  if (!launched_) {
    launch_pack();
    communicator_.launched(launch_calls());
    launched_ = true;
    if (!communicator_.ready()) return Progress::kMoved;
  }
  mover_.launch(plan_.unpack, table_ + plan_.pack.bytes(), device_->stream());
  device_->free(std::exchange(scratch_, 0), device_->stream());
  return finish();
}

// An agreed point of the log: registering may be collective.
void NcclPlane::look_up_windows() {
  bases_.clear();
  for (const Part& part : parts_) {
    const uint32_t number = part.signature.place.window;
    if (!api_->registers_memory() || !may_be_placed(part) || bases_.contains(number)) continue;
    const std::shared_ptr<GpuWindow> window = windows_.find(set_, number);
    if (!window) {
      throw Error(ErrorCode::kInvalidArgument,
                  "window " + std::to_string(number) +
                      " was closed on this rank while others reduce tensors in it");
    }
    communicator_.know(window);
    bases_[number] = window->address();
  }
}

void NcclPlane::launch_pack() {
  const cuda::Stream stream = device_->stream();
  plan_.make(parts_, 0, bases_);
  const size_t tables = plan_.pack.bytes() + plan_.unpack.bytes();
  const size_t bytes = plan_.scratch_bytes() + tables;
  scratch_ = bytes > 0 ? device_->allocate(bytes, stream) : 0;
  plan_.make(parts_, scratch_, bases_);
  table_ = scratch_ + plan_.scratch_bytes();
  wait_for_inputs();
  if (tables > 0) upload();
  mover_.launch(plan_.pack, table_, stream);
}

// Both tables in one copy, from pinned memory that lives until the bucket is done.
void NcclPlane::upload() {
  const size_t first = plan_.pack.bytes(), second = plan_.unpack.bytes();
  auto pinned = device_->pinned(first + second);
  if (first > 0) std::memcpy(pinned->data(), plan_.pack.chunks().data(), first);
  if (second > 0) std::memcpy(pinned->data() + first, plan_.unpack.chunks().data(), second);
  const auto source = reinterpret_cast<uintptr_t>(pinned->data());
  device_->api().check(device_->api().copy_async(table_, source, first + second, device_->stream()),
                       "cuMemcpyAsync of the segment table");
  work_.keep = {std::move(pinned)};
}

void NcclPlane::wait_for_inputs() {
  std::set<const GpuEvent*> seen;
  for (const Part& part : parts_) {
    if (part.produced && seen.insert(part.produced.get()).second) {
      part.produced->make_wait(device_->stream());
    }
  }
}

// All calls are one group: NCCL launches them together.
nccl::Result NcclPlane::launch_calls() {
  if (plan_.calls.empty()) return nccl::kSuccess;
  const nccl::Comm comm = communicator_.get();
  // The operators first: NCCL makes them outside of groups.
  for (const NcclCall& call : plan_.calls) {
    if (call.weight != 1.0) communicator_.weighted(call.weight, call.type);
  }
  api_->check(api_->group_start(), "ncclGroupStart", comm);
  nccl::Result refused = nccl::kSuccess;
  for (const NcclCall& call : plan_.calls) {
    if (refused == nccl::kSuccess || refused == nccl::kInProgress) refused = launch(call);
  }
  const nccl::Result result = api_->group_end();  // a group that was begun must end
  api_->check(refused, "an NCCL call", comm);
  api_->check(result, "ncclGroupEnd", comm);
  return result;
}

nccl::Result NcclPlane::launch(const NcclCall& call) {
  const nccl::Comm comm = communicator_.get();
  const cuda::Stream stream = device_->stream();
  const auto* const in = reinterpret_cast<const void*>(call.input);
  auto* const out = reinterpret_cast<void*>(call.output);
  const nccl::RedOp op =
      call.weight == 1.0 ? call.op : communicator_.weighted(call.weight, call.type);
  using Kind = NcclCall::Kind;
  switch (call.kind) {
    case Kind::kAllReduce:
      return api_->all_reduce(in, out, call.count, call.type, op, comm, stream);
    case Kind::kReduceScatter:
      return api_->reduce_scatter(in, out, call.count, call.type, op, comm, stream);
    case Kind::kReduce:
      return api_->reduce(in, out, call.count, call.type, op, call.peer, comm, stream);
    case Kind::kAllGather: return api_->all_gather(in, out, call.count, call.type, comm, stream);
    case Kind::kBroadcast:
      return api_->broadcast(in, out, call.count, call.type, call.peer, comm, stream);
    case Kind::kSend: return api_->send(in, call.count, call.type, call.peer, comm, stream);
    case Kind::kReceive: return api_->receive(out, call.count, call.type, call.peer, comm, stream);
  }
  return nccl::kSuccess;
}

// Scratch memory of a bucket that was cut short goes back in the order of our stream.
void NcclPlane::abort() {
  communicator_.abort();
  device_->free(std::exchange(scratch_, 0), device_->stream());
  parts_ = {};
}

}  // namespace farandole
