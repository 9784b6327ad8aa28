// SPDX-License-Identifier: Apache-2.0
// See gpu_adasum.h. Called through the C ABI, by the user's threads; it blocks them.
#include "data/gpu/gpu_adasum.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "kernels/gpu_source.h"

namespace farandole {
namespace {

constexpr size_t kElementsOfBlock = 16 * 1024;  // of both rows, at least
constexpr size_t kMostBlocks = 256;             // of one pair of rows

void check_float(DType type) {
  if (traits_of(type).is_float()) return;
  throw Error(ErrorCode::kWrongType,
              std::string("Adasum of ") + name_of(type) + ": it takes floats only");
}

// Device memory that is used in the order of one stream.
class Scratch {
 public:
  Scratch(GpuDevice& device, size_t bytes, cuda::Stream stream)
      : device_(device), stream_(stream), address_(device.allocate(bytes, stream)) {}
  ~Scratch() { device_.free(address_, stream_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  cuda::Address address() const { return address_; }

 private:
  GpuDevice& device_;
  const cuda::Stream stream_;
  const cuda::Address address_;
};

cuda::Address address_of(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

}  // namespace

GpuAdasum::GpuAdasum(std::shared_ptr<const GpuModule> module, const GpuMover& mover)
    : module_(std::move(module)), mover_(mover), dots_(module_->function(gpu::kDotsKernel)) {}

void GpuAdasum::dots(DType type, cuda::Address rows, size_t count, size_t elements,
                     cuda::Stream stream, double* dots) const {
  check_float(type);
  std::fill_n(dots, count * count, 0.0);
  if (count == 0 || elements == 0) return;
  GpuDevice& device = *module_->device();
  const cuda::Api& api = device.api();
  const size_t pairs = count * (count + 1) / 2;
  const size_t blocks = std::clamp<size_t>(elements / kElementsOfBlock, 1, kMostBlocks);
  const size_t bytes = pairs * blocks * sizeof(double);
  const auto pinned = device.pinned(bytes);
  GpuDevice::Scope scope(device);
  const Scratch partials(device, bytes, stream);
  gpu::DotTask task{};
  task.rows = rows, task.partials = partials.address(), task.elements = elements;
  task.count = static_cast<unsigned>(count), task.blocks = static_cast<unsigned>(blocks);
  task.type = static_cast<unsigned char>(type);
  void* parameters[] = {&task};
  api.check(api.launch(dots_, static_cast<unsigned>(pairs * blocks), 1, 1, gpu::kDotThreads, 1, 1,
                       0, stream, parameters, nullptr),
            "launching the dot product kernel");
  api.check(api.copy_async(address_of(pinned->data()), partials.address(), bytes, stream),
            "cuMemcpyAsync of dot products");
  device.recorded(stream)->wait();
  const auto* sums = reinterpret_cast<const double*>(pinned->data());
  for (size_t i = 0; i < count; ++i) {
    for (size_t j = 0; j <= i; ++j) {
      for (size_t block = 0; block < blocks; ++block) dots[i * count + j] += *sums++;
      dots[j * count + i] = dots[i * count + j];
    }
  }
}

void GpuAdasum::scale(DType to, cuda::Address target, DType from, cuda::Address source,
                      size_t elements, double factor, cuda::Stream stream) const {
  check_float(from);
  check_float(to);
  const bool widens = to == traits_of(from).carrier;
  const bool narrows = from == traits_of(to).carrier;
  if (from != to && !widens && !narrows) {
    throw Error(ErrorCode::kWrongType,
                std::string("no ") + name_of(to) + " is made of " + name_of(from));
  }
  MoveList list;
  list.convert(target, to, source, from, elements, factor, 1);
  if (list.empty()) return;
  GpuDevice& device = *module_->device();
  const auto pinned = device.pinned(list.bytes());
  std::memcpy(pinned->data(), list.chunks().data(), list.bytes());
  GpuDevice::Scope scope(device);
  const Scratch table(device, list.bytes(), stream);
  device.api().check(
      device.api().copy_async(table.address(), address_of(pinned->data()), list.bytes(), stream),
      "cuMemcpyAsync of the segment table");
  mover_.launch(list, table.address(), stream);
  device.recorded(stream)->wait();
}

}  // namespace farandole
