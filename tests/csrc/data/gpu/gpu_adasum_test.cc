// SPDX-License-Identifier: Apache-2.0
// Dot products and scaled copies on a GPU, over the GPU double; gpu_kernels_test compiles the kernels themselves.
#include "data/gpu/gpu_adasum.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "kernels/kernels_reference.h"
#include "lib/gpu/gpu_library.h"

using namespace farandole;
using namespace farandole::check;

namespace {

using Half = reference::SmallFloat<10, -14>;
using Brain = reference::SmallFloat<7, -126>;

// One GPU with our kernels, and numbers in its memory.
struct Bench {
  std::shared_ptr<GpuDevice> device = GpuDevice::open(gpu_library().cuda, 0);
  std::shared_ptr<const GpuModule> module =
      std::make_shared<GpuModule>(device, *gpu_library().nvrtc);
  GpuMover mover{module};
  GpuAdasum adasum{module, mover};
};

template <class Encode>
auto encoded(const std::vector<double>& values, Encode&& encode) {
  std::vector<decltype(encode(0.0))> stored;
  for (double value : values) stored.push_back(encode(value));
  return stored;
}

template <class T>
cuda::Address address_of(const std::vector<T>& values) {
  return reinterpret_cast<uintptr_t>(values.data());
}

// Small whole numbers: exact in every type, however they are added.
std::vector<double> matrix(size_t rows, size_t columns) {
  std::vector<double> values(rows * columns);
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<double>((i * 7 + i / columns) % 13) - 6;
  }
  return values;
}

template <class T>
void check_dots(const Bench& bench, DType type, size_t count, const std::vector<double>& values,
                const std::vector<T>& stored) {
  const size_t elements = values.size() / count;
  std::vector<double> dots(count * count, NAN);
  bench.adasum.dots(type, address_of(stored), count, elements, bench.device->stream(), dots.data());
  for (size_t i = 0; i < count; ++i) {
    for (size_t j = 0; j < count; ++j) {
      double expected = 0;
      for (size_t k = 0; k < elements; ++k) {
        expected += values[i * elements + k] * values[j * elements + k];
      }
      CHECK_EQ(dots[i * count + j], expected);
    }
  }
}

}  // namespace

TEST(dot_products_of_all_pairs_of_rows) {
  {
    const Bench bench;
    for (size_t count : {1, 2, 3, 8}) {
      for (size_t elements : {1, 100, 70'000}) {
        const std::vector<double> values = matrix(count, elements);
        check_dots(bench, DType::kFloat64, count, values, values);
        const auto single = [](double x) { return static_cast<float>(x); };
        check_dots(bench, DType::kFloat32, count, values, encoded(values, single));
        const auto half = [](double x) { return Half::encode(static_cast<float>(x)); };
        check_dots(bench, DType::kFloat16, count, values, encoded(values, half));
        const auto brain = [](double x) { return Brain::encode(static_cast<float>(x)); };
        check_dots(bench, DType::kBFloat16, count, values, encoded(values, brain));
      }
    }
  }
  CHECK_EQ(gpu_library().alive(), 0);
}

TEST(dot_products_of_nothing_are_zero) {
  const Bench bench;
  double dots[4] = {1, 2, 3, 4};
  bench.adasum.dots(DType::kFloat32, 0, 2, 0, bench.device->stream(), dots);
  for (double dot : dots) CHECK_EQ(dot, 0.0);
}

TEST(scaled_copies_round_to_their_type) {
  const Bench bench;
  const std::vector<double> values = matrix(1, 1000);
  const auto wide = encoded(values, [](double x) { return static_cast<float>(x); });
  std::vector<uint16_t> narrow(wide.size());
  bench.adasum.scale(DType::kBFloat16, address_of(narrow), DType::kFloat32, address_of(wide),
                     wide.size(), 0.3, bench.device->stream());
  std::vector<float> again(wide.size());
  bench.adasum.scale(DType::kFloat32, address_of(again), DType::kBFloat16, address_of(narrow),
                     again.size(), 2.0, bench.device->stream());
  for (size_t i = 0; i < wide.size(); ++i) {
    const uint16_t expected = Brain::encode(wide[i] * 0.3F);
    CHECK_EQ(narrow[i], expected);
    CHECK_EQ(again[i], Brain::decode(expected) * 2.0F);
  }
}

TEST(other_types_are_refused) {
  const Bench bench;
  double dot = 0;
  const cuda::Stream stream = bench.device->stream();
  CHECK_THROWS(bench.adasum.dots(DType::kInt32, 0, 1, 1, stream, &dot), ErrorCode::kWrongType);
  CHECK_THROWS(bench.adasum.scale(DType::kFloat32, 0, DType::kFloat64, 0, 1, 1.0, stream),
               ErrorCode::kWrongType);
}
