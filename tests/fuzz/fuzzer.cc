// SPDX-License-Identifier: Apache-2.0
// message_fuzz [--seconds 20] [--seed 1] | message_fuzz FILE...: runs these inputs only.
#include "fuzzer.h"

#include <sanitizer/common_interface_defs.h>

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>

#include "random.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace farandole::fuzz {
namespace {

using check::Random;

constexpr size_t kMapBytes = 1 << 16;
constexpr size_t kLongest = 4096;
constexpr std::array<uint32_t, 9> kTelling = {0,    1,          0x7f,       0x80,      0xff,
                                              1000, 0x7fffffff, 0x80000000, 0xffffffff};

std::array<uint8_t, kMapBytes> hits;  // of one run, by edge
std::array<uint8_t, kMapBytes> seen;  // bits: hit counts so far, in powers of two
uintptr_t last_place = 0;
const Input* running = nullptr;

// Merges the hits of one run; true: some edge was taken, or taken that often, for the first time.
bool learn() {
  bool news = false;
  for (size_t i = 0; i < kMapBytes; ++i) {
    if (hits[i] == 0) continue;
    const auto bit = static_cast<uint8_t>(1 << std::min(7, std::bit_width(hits[i]) - 1));
    news |= (seen[i] & bit) == 0;
    seen[i] |= bit;
  }
  return news;
}

bool run(const Input& input) {
  hits.fill(0);
  last_place = 0;
  running = &input;
  LLVMFuzzerTestOneInput(input.data(), input.size());
  running = nullptr;
  return learn();
}

// What broke it, for the next run by FILE.
void save_input() {
  if (!running) return;
  std::ofstream file("crash.bin", std::ios::binary);
  file.write(reinterpret_cast<const char*>(running->data()), std::ssize(*running));
  std::fputs("the input is in crash.bin; run this program on it\n", stderr);
}

void mutate(Random& random, Input& input, const std::vector<Input>& corpus) {
  const size_t at = random.below(input.size() + 1);
  switch (random.below(6)) {
    case 0:
      if (at < input.size()) input[at] ^= static_cast<uint8_t>(1 << random.below(8));
      break;
    case 1:
      if (at < input.size()) input[at] = static_cast<uint8_t>(random.below(256));
      break;
    case 2: {  // a length or a count
      const uint32_t value = kTelling[random.below(kTelling.size())];
      if (at + sizeof value <= input.size()) std::memcpy(&input[at], &value, sizeof value);
      break;
    }
    case 3: {
      const size_t count = std::min(1 + random.below(16), input.size() - at);
      input.erase(input.begin() + static_cast<ptrdiff_t>(at),
                  input.begin() + static_cast<ptrdiff_t>(at + count));
      break;
    }
    case 4:
      input.insert(input.begin() + static_cast<ptrdiff_t>(at), 1 + random.below(8),
                   static_cast<uint8_t>(random.below(256)));
      break;
    default: {  // the rest of another
      const Input& other = corpus[random.below(corpus.size())];
      const size_t from = random.below(other.size() + 1);
      input.resize(at);
      input.insert(input.end(), other.begin() + static_cast<ptrdiff_t>(from), other.end());
    }
  }
  if (input.size() > kLongest) input.resize(kLongest);
}

int run_files(int count, char** names) {
  for (int i = 0; i < count; ++i) {
    std::ifstream file(names[i], std::ios::binary);
    const Input input{std::istreambuf_iterator<char>(file), {}};
    run(input);
  }
  return 0;
}

int search(double seconds, uint64_t seed) {
  std::vector<Input> corpus = seeds();
  for (const Input& input : corpus) run(input);
  const auto edges = [] { return std::ranges::count_if(seen, [](uint8_t b) { return b != 0; }); };
  const auto begun = edges();
  Random random(seed);
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  uint64_t runs = 0;
  while (std::chrono::steady_clock::now() < end) {
    for (int i = 0; i < 100; ++i, ++runs) {
      Input input = corpus[random.below(corpus.size())];
      for (size_t changes = 1 + random.below(5); changes > 0; --changes) {
        mutate(random, input, corpus);
      }
      if (run(input)) corpus.push_back(std::move(input));
    }
  }
  std::printf("%lu runs of --seed %lu, %zu inputs, %ld edges after the seeds, %ld at the end\n",
              static_cast<unsigned long>(runs), static_cast<unsigned long>(seed), corpus.size(),
              static_cast<long>(begun), static_cast<long>(edges()));
  return begun > 0 && edges() > begun ? 0 : 1;  // else nothing is instrumented
}

}  // namespace
}  // namespace farandole::fuzz

// The compiler calls it at every edge of the instrumented code.
extern "C" void __sanitizer_cov_trace_pc() {
  using namespace farandole::fuzz;
  const auto place = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
  uint8_t& count = hits[(place ^ (last_place >> 1)) % kMapBytes];
  if (count < 255) ++count;
  last_place = place;
}

int main(int argc, char** argv) {
  using namespace farandole::fuzz;
  __sanitizer_set_death_callback(save_input);
  std::signal(SIGABRT, [](int) {  // the target's own checks
    save_input();
    std::_Exit(1);
  });
  double seconds = 20;
  uint64_t seed = 1;
  for (int i = 1; i < argc; i += 2) {
    const std::string name = argv[i];
    if (name.rfind("--", 0) != 0) return run_files(argc - i, argv + i);
    if (i + 1 == argc) return 2;
    if (name == "--seconds") seconds = std::stod(argv[i + 1]);
    if (name == "--seed") seed = std::stoull(argv[i + 1]);
  }
  return search(seconds, seed);
}
