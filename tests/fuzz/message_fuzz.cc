// SPDX-License-Identifier: Apache-2.0
// What must hold for any bytes that claim to be a control message: they are refused by Error(kInternal), or
// they are exactly what encode() writes for what was read.
#include <algorithm>
#include <cstdlib>
#include <memory>

#include "control/protocol/message.h"
#include "control/protocol/random_messages.h"
#include "fuzzer.h"

using namespace farandole;

namespace {

template <class Message, class Decode>
void judge(ByteView bytes, Decode&& decode) {
  try {
    const Message message = decode(bytes);
    ByteString again;
    encode(message, again);
    if (!std::ranges::equal(again, bytes)) std::abort();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kInternal) std::abort();
  }
}

}  // namespace

// The first byte chooses the direction. libFuzzer's entry point.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  // A copy of exactly this size: ASan sees every byte read beyond it.
  const std::unique_ptr<std::byte[]> copy(new std::byte[size - 1]);
  std::transform(data + 1, data + size, copy.get(), [](uint8_t b) { return std::byte{b}; });
  const ByteView bytes(copy.get(), size - 1);
  if (data[0] % 2 == 0) {
    judge<Report>(bytes, decode_report);
  } else {
    judge<Entry>(bytes, decode_entry);
  }
  return 0;
}

std::vector<fuzz::Input> fuzz::seeds() {
  std::vector<Input> inputs;
  check::Random random(1);
  ByteString storage;
  auto add = [&](uint8_t direction, const auto& message) {
    ByteString bytes;
    encode(message, bytes);
    Input input{direction};
    for (std::byte b : bytes) input.push_back(std::to_integer<uint8_t>(b));
    inputs.push_back(std::move(input));
  };
  for (int round = 0; round < 4; ++round) {
    for (size_t kind = 0; kind < std::variant_size_v<Report>; ++kind) {
      add(0, random_report(random, kind, storage));
    }
    for (size_t kind = 0; kind < std::variant_size_v<Entry>; ++kind) {
      add(1, random_entry(random, kind));
    }
  }
  return inputs;
}
