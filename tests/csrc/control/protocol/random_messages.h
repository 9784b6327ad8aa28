// SPDX-License-Identifier: Apache-2.0
// Reports and log entries of every kind with random content.
#pragma once

#include <string>
#include <vector>

#include "control/protocol/message.h"
#include "random.h"

namespace farandole {

using check::Random;

inline std::string random_text(Random& random, size_t most) {
  std::string text(random.below(most + 1), '\0');
  for (char& c : text) c = static_cast<char>(random.below(256));
  return text;
}

template <class T>
std::vector<T> random_numbers(Random& random) {
  std::vector<T> numbers(random.below(6));
  for (T& n : numbers) n = static_cast<T>(random.next());
  return numbers;
}

inline ByteString random_bytes(Random& random, size_t most) {
  ByteString bytes(random.below(most + 1));
  for (std::byte& b : bytes) b = static_cast<std::byte>(random.below(256));
  return bytes;
}

inline Signature random_signature(Random& random) {
  Signature s;
  s.op = static_cast<Op>(random.below(kOpCount));
  s.reduce_op = static_cast<ReduceOp>(random.below(6));
  s.dtype = static_cast<DType>(random.below(kDTypeCount));
  s.device = random.between(-1, 7);
  s.root = random.between(-1, 4095);
  s.prescale = random.unit() * 1e9;
  s.postscale = -random.unit();
  s.shape = random_numbers<int64_t>(random);
  s.group_size = random.between(1, 1000);
  s.window_range = {static_cast<uint32_t>(random.below(3)), random.next(), random.next()};
  return s;
}

inline Request random_request(Random& random) {
  return {static_cast<SetId>(random.next()),
          random_text(random, 40),
          random_text(random, 20),
          random_signature(random),
          random.between(-1, 4095),
          static_cast<int64_t>(random.next()),
          random_text(random, 20)};
}

inline CallKey random_key(Random& random) {
  return {static_cast<SetId>(random.next()), random_text(random, 40), random.next(),
          random.between(-1, 4095)};
}

inline Failure random_failure(Random& random) {
  return {static_cast<ErrorCode>(random.below(9)), random_text(random, 200)};
}

inline uint32_t random_id(Random& random) { return static_cast<uint32_t>(random.next()) | 1; }

inline IdRuns random_ids(Random& random) {
  IdRuns ids;
  for (size_t runs = random.below(5); runs > 0; --runs) {
    ids.add({1 + static_cast<uint32_t>(random.below(1 << 20)),
             1 + static_cast<uint32_t>(random.below(1000))});
  }
  return ids;
}

inline SetUp random_set_up(Random& random) {
  return {static_cast<SetId>(random.next()),
          random_text(random, 20),
          random_text(random, 128),
          BackendKind{random.between(0, kBackendKindCount - 1)},
          random.chance(0.5),
          random.chance(0.5),
          random_numbers<int32_t>(random)};
}

inline Contribution random_contribution(Random& random, ByteString& storage) {
  storage = random_bytes(random, kTinyBytes);
  return {random.chance(0.5), random.chance(0.5), static_cast<int64_t>(random.next()),
          random_numbers<int64_t>(random), storage};
}

// The payload of a Ready or Post is a view: `storage` holds the bytes.
inline Report random_report(Random& random, size_t kind, ByteString& storage) {
  switch (kind) {
    case 0: {
      Ready ready;
      if (random.chance(0.5)) ready.id = random_id(random);
      if (ready.id == 0) ready.request = random_request(random);
      ready.sequence = random.next();
      ready.contribution = random_contribution(random, storage);
      return ready;
    }
    case 1: return Refuse{random_key(random), random_failure(random)};
    case 2: return Join{static_cast<SetId>(random.next()), random_failure(random)};
    case 3: return Done{static_cast<SetId>(random.next()), random.next(), random.chance(0.5)};
    case 4: return Forgot{random_id(random)};
    case 5: return Leave{random.chance(0.5), random_text(random, 300)};
    case 6: return StackReport{random.chance(0.5), random_text(random, 300)};
    case 10:
      return UseGpu{random_text(random, 16), random.between(0, 4095), random_text(random, 20),
                    random_text(random, 40), random.chance(0.5)};
    case 11: return random_set_up(random);
    case 12: return Expedite{};
    case 13:
      return Post{random_request(random), random.next(), random_contribution(random, storage),
                  random_failure(random)};
    case 7: return Inquire{random.next(), random_key(random), random.chance(0.5)};
    case 8: return ReadyMany{random_ids(random)};
    default: return Lost{random_failure(random)};
  }
}

inline Run random_run(Random& random) {
  Run run{static_cast<SetId>(random.next()), random.next(), {}};
  for (size_t items = random.below(5); items > 0; --items) {
    run.items.push_back({random_id(random), random.next(), static_cast<int64_t>(random.next()),
                         random_numbers<int32_t>(random), random_numbers<int64_t>(random)});
  }
  run.plain = random_ids(random);
  run.gpu = random.chance(0.5);
  return run;
}

inline Entry random_entry(Random& random, size_t kind) {
  auto set = static_cast<SetId>(random.next());
  switch (kind) {
    case 0: return Define{random_id(random), random_request(random)};
    case 1: return Forget{random_id(random)};
    case 2: return random_run(random);
    case 3:
      return Result{set,
                    random_id(random),
                    random.next(),
                    random.chance(0.5),
                    random_numbers<int64_t>(random),
                    random_bytes(random, 2 * kTinyBytes)};
    case 4:
      return Fail{random_key(random), random_failure(random), random_numbers<int32_t>(random)};
    case 5: return Joined{set, random.between(0, 4095), random.next(), random_failure(random)};
    case 6: return OpenSet{set, random_numbers<int32_t>(random), random_key(random)};
    case 7: return CloseSet{set, random_key(random)};
    case 8: return Abort{random_failure(random)};
    case 9: return Stop{};
    case 10: return CollectStacks{random_numbers<int32_t>(random)};
    case 12: return random_set_up(random);
    case 11: return Inform{random.between(0, 4095), random.next(), random_text(random, 300)};
    case 14: return Notice{set, random_text(random, 300)};
    default:
      return Matched{set,           random.next(),           random.between(0, 4095),
                     random.next(), random.between(0, 4095), random.next()};
  }
}

}  // namespace farandole
