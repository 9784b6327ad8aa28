// SPDX-License-Identifier: Apache-2.0
#include "runtime/simulation/rank.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "base/abi.h"
#include "check.h"
#include "runtime/simulation/world.h"

namespace farandole::simulation {
namespace {

using Kind = Action::Kind;

uint8_t outcome_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::kMismatch: return kMismatched;
    case ErrorCode::kLibrary:  // no memory for a set
    case ErrorCode::kInvalidArgument: return kInvalid;
    case ErrorCode::kWrongType: return kRefused;
    case ErrorCode::kPeer: return kPeerGone;
    case ErrorCode::kStall: return kStalled;
    default: return 0;
  }
}

std::vector<std::byte> bytes_of(const std::vector<int32_t>& values, size_t element) {
  std::vector<std::byte> bytes(std::max<size_t>(values.size() * element, 1));
  if (!values.empty()) std::memcpy(bytes.data(), values.data(), values.size() * sizeof(int32_t));
  return bytes;
}

}  // namespace

SimulatedRank::SimulatedRank(const Program& program, Topology its_topology, Config config,
                             World& world)
    : topology(std::move(its_topology)),
      program_(program),
      config_(std::move(config)),
      world_(world),
      states_(program.calls.size()) {
  ids_[0] = kWorldSet;
}

std::string SimulatedRank::where() const {
  const auto& actions = program_.actions[static_cast<size_t>(topology.rank)];
  return "rank " + std::to_string(topology.rank) + ", action " + std::to_string(next_action_) +
         " of " + std::to_string(actions.size()) + ": " + doing_;
}

void SimulatedRank::fail(const std::string& text) const {
  world_.give_up("rank " + std::to_string(topology.rank) + ": " + text);
}

void SimulatedRank::live() {
  world_.start(*this, config_, runtime_);
  const auto& actions = program_.actions[static_cast<size_t>(topology.rank)];
  for (; next_action_ < actions.size() && !leaves_; ++next_action_) {
    act(actions[next_action_]);
    if (batch_.empty()) world_.kernel().yield();
  }
  left_ = true;
  if (runtime_->broken()) world_.count_broken();
  runtime_.reset();
  done_ = true;
}

void SimulatedRank::act(const Action& action) {
  const auto value = static_cast<int>(action.value);
  doing_ = "kind " + std::to_string(static_cast<int>(action.kind)) + ", value " +
           std::to_string(action.value);
  switch (action.kind) {
    case Kind::kSubmit: return submit(value, action.more, value % 4 != topology.rank % 4);
    case Kind::kCall: submit(value, false, true); return wait(value);
    case Kind::kDuplicate: return duplicate(value);
    case Kind::kWait: return wait(value);
    case Kind::kWaitAll: return wait_all();
    case Kind::kJoin: return join(value);
    case Kind::kSync: return sync(action.value);
    case Kind::kPause: {
      Kernel& kernel = world_.kernel();
      return kernel.sleep_for(World::kPauses + static_cast<uint64_t>(topology.rank),
                              kernel.now_ns() + action.value);
    }
    case Kind::kLeave: return leave(false);
    case Kind::kFail: return leave(true);
    case Kind::kDie: return world_.die_now(topology.rank);
  }
}

// ---- Calls

farandole_request SimulatedRank::request_of(int index, int member, size_t part,
                                            const Dimensions& shape) {
  const PlannedCall& call = planned(index);
  const Request& request = call.request_of(member);
  const Signature& s = request.part(part);
  farandole_request raw{};
  raw.op = static_cast<int32_t>(s.op);
  raw.reduce_op = static_cast<int32_t>(s.reduce_op);
  raw.dtype = static_cast<int32_t>(s.dtype);
  raw.device = kCpuDevice;
  raw.root = call.removes >= 0 ? ids_.at(call.removes) : s.root;
  raw.process_set = ids_.at(call.set);
  raw.prescale = s.prescale;
  raw.postscale = s.postscale;
  raw.ndim = static_cast<int32_t>(shape.size());
  raw.shape = shape.data();
  raw.name = request.name.empty() ? nullptr : request.name.c_str();
  if (!call.message()) return raw;
  const auto& ranks = program_.sets[static_cast<size_t>(call.set)].ranks;
  const bool sends = member == call.sender;
  raw.op = static_cast<int32_t>(sends ? Op::kSend : Op::kReceive);
  raw.root = ranks[static_cast<size_t>(sends ? call.receiver : call.sender)];
  if (!sends && call.from_any) raw.root = kAnyRank;
  raw.tag = call.tag;
  return raw;
}

// Prepares the call and its buffers. False: it has ended.
bool SimulatedRank::make(int index, State& made) {
  const PlannedCall& call = planned(index);
  const int member = program_.sets[static_cast<size_t>(call.set)].member_of(topology.rank);
  const Request& meant = call.request_of(member);
  const size_t parts = meant.parts();
  std::vector<farandole_request> raw;
  std::vector<Dimensions> shapes;
  std::vector<std::vector<int64_t>> splits;
  shapes.reserve(parts), splits.reserve(parts);
  for (size_t i = 0; i < parts; ++i) {
    shapes.push_back(shape_of(program_, index, member, i));
    splits.push_back(splits_of(program_, index, member));
    raw.push_back(request_of(index, member, i, shapes.back()));
    raw.back().n_splits = static_cast<int32_t>(splits.back().size());
    raw.back().splits = splits.back().data();
    // Lines of some unnamed calls differ between ranks, which must change nothing.
    static constexpr const char* kSites[] = {"line 0", "line 1", "line 2"};
    if (index % 3 != 0) raw.back().site = kSites[(index + (index % 3) * (topology.rank % 3)) % 3];
    const Signature& s = meant.part(i);
    const auto input = input_of(program_, index, member, i);
    const bool receives = call.message() && member == call.receiver;
    const bool sized =
        receives || (!call.message() && s.traits().moves_bytes() && s.traits().rows == Rows::kNone);
    // The shape of a call that makes a set is a list of ranks: its product may overflow.
    const bool fixed = sized && !s.traits().ragged();
    const auto bytes = static_cast<size_t>(fixed ? s.elements() : 0) * 8;
    made.inputs.push_back(input ? bytes_of(*input, size_of(s.dtype)) : std::vector<std::byte>());
    made.outputs.emplace_back(sized ? bytes + 1 : 0);
    made.in.push_back(input && !receives ? reinterpret_cast<uintptr_t>(made.inputs.back().data())
                                         : 0);
    made.out.push_back(sized ? reinterpret_cast<uintptr_t>(made.outputs.back().data()) : 0);
    raw.back().input = reinterpret_cast<const void*>(made.in.back());
    raw.back().output = reinterpret_cast<void*>(made.out.back());
  }
  made.handles.assign(parts, 0);
  try {
    made.prepared = runtime_->prepare(raw, parts);
    return true;
  } catch (const Error& error) {
    doing_ += std::string(" (") + error.what() + ")";
    end(index, outcome_of(error.code()));
    return false;
  }
}

// `waits`: as a caller that waits for it, unless it shares a batch with others.
void SimulatedRank::submit(int index, bool more, bool waits) {
  const PlannedCall& call = planned(index);
  state(index).begun_ns = now_ns();
  if (!known(call.set) || (call.removes >= 0 && !known(call.removes))) {
    end(index, kSkipped);
    if (!more) pass_batch();
    return;
  }
  const int member = program_.sets[static_cast<size_t>(call.set)].member_of(topology.rank);
  const Request& meant = call.request_of(member);
  if (!meant.name.empty()) {  // a careful user waits
    auto [last, fresh] = last_.try_emplace({call.set, meant.name}, index);
    if (!fresh && under_way_.contains(last->second)) {
      pass_batch();
      wait(last->second);
    }
    last->second = index;
  }
  if (call.roles[static_cast<size_t>(member)] == Role::kRefuse) {
    pass_batch();
    const Dimensions shape = shape_of(program_, index, member, 0);
    try {
      runtime_->refuse(request_of(index, member, 0, shape), {ErrorCode::kWrongType, "refused"});
      end(index, kRefused);
    } catch (const Error& error) {
      end(index, outcome_of(error.code()));
    }
    return;
  }
  State& made = state(index);
  if (make(index, made)) {
    if (batch_.empty() && !more && waits) {
      begin(index);
    } else {
      batch_.push_back(index);
    }
  }
  if (!more) pass_batch();
}

// As a caller that waits begins: in a cell perhaps.
void SimulatedRank::begin(int index) {
  State& made = state(index);
  PreparedSubmission one{&made.prepared, made.in, made.out, {}, made.handles};
  world_.makes(index);
  try {
    if (runtime_->call(one)) {
      ++direct_calls_;
      check_result(index);
      return end(index, kDone);
    }
    under_way_.insert(index);
  } catch (const Error& error) {
    doing_ += std::string(" (") + error.what() + ")";
    end(index, outcome_of(error.code()));
  }
}

void SimulatedRank::pass_batch() {
  while (!batch_.empty()) {
    std::vector<PreparedSubmission> all;
    for (int index : batch_) {
      State& made = state(index);
      all.push_back({&made.prepared, made.in, made.out, {}, made.handles});
      world_.makes(index);
    }
    uint8_t refused = 0;
    try {
      runtime_->submit(all);
    } catch (const Error& error) {
      doing_ += std::string(" (") + error.what() + ")";
      refused = outcome_of(error.code());
    }
    const auto taken = [this](int index) { return state(index).handles.front() != 0; };
    size_t count = 0;
    while (count < batch_.size() && taken(batch_[count])) under_way_.insert(batch_[count++]);
    if (count < batch_.size()) end(batch_[count++], refused);
    batch_.erase(batch_.begin(), batch_.begin() + static_cast<ptrdiff_t>(count));
  }
}

// A name can't be used twice at a time: an error here, and nothing for anybody else.
void SimulatedRank::duplicate(int index) {
  if (!batch_.empty() || !under_way_.contains(index) || planned(index).request.name.empty()) return;
  for (Handle handle : state(index).handles) {
    if (runtime_->handles().done(handle)) return;
  }
  State again;
  if (runtime_->broken() || !make(index, again)) return;
  PreparedSubmission one{&again.prepared, again.in, again.out, {}, again.handles};
  try {
    runtime_->submit({&one, 1});
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::kInvalidArgument || runtime_->broken());
    return world_.count_duplicate();
  }
  fail("a name is taken twice");
}

// ---- Ends

void SimulatedRank::wait(int index) {
  if (!under_way_.contains(index)) return;
  Failure ignored;
  const int64_t begun = now_ns();
  const auto& handles = state(index).handles;
  while (runtime_->driver().wait(handles, Deadline::never(), ignored, true) == WaitEnd::kTimeIsUp) {
  }
  world_.check_wait(topology.rank, begun);
  finish(index);
  const bool worked = (state(index).outcome & (kDone | kAbsent)) != 0;
  if (worked) world_.check_prompt(topology.rank, index, begun);
}

void SimulatedRank::wait_all() {
  while (!under_way_.empty()) wait(*under_way_.begin());
}

void SimulatedRank::finish(int index) {
  State& made = state(index);
  under_way_.erase(index);
  Failure failure;
  bool absent = true;
  for (Handle handle : made.handles) {
    // A failed group's other tensors end with it.
    CHECK(runtime_->handles().done(handle));
    runtime_->handles().look(handle, [&](const auto& ended) {
      if (ended.failure) failure = ended.failure;
      absent = absent && ended.absent;
      if (planned(index).request.signature.op == Op::kAddSet && !ended.failure) {
        for (size_t s = 1; s < program_.sets.size(); ++s) {
          if (program_.sets[s].added_by == index) {
            ids_[static_cast<int>(s)] = static_cast<SetId>(ended.value);
          }
        }
      }
    });
  }
  if (failure) doing_ += " (" + failure.text + ")";
  if (!failure && !absent) check_result(index);
  for (Handle handle : made.handles) runtime_->handles().release(handle);
  const PlannedCall& call = planned(index);
  const int member = program_.sets[static_cast<size_t>(call.set)].member_of(topology.rank);
  const bool barrier = call.request_of(member).signature.op == Op::kBarrier;
  if (failure.code == ErrorCode::kShutdown && early_) return end(index, kPeerGone);
  if (failure) return end(index, outcome_of(failure.code));
  end(index, absent && !barrier ? kAbsent : kDone);
}

void SimulatedRank::end(int index, uint8_t outcome) {
  const PlannedCall& call = planned(index);
  uint8_t& known_outcome = state(index).outcome;
  if (known_outcome != 0) fail("call " + std::to_string(index) + " ends twice");
  const uint8_t allowed = world_.troubled() ? call.allowed : call.calm;
  if ((allowed & outcome) == 0 && !(early_ && outcome == kPeerGone)) {
    std::string roles;
    for (Role role : call.roles) roles += "-i.r"[static_cast<size_t>(role)];
    fail("call " + std::to_string(index) + " '" + call.request.name + "' (" +
         name_of(call.request.signature.op) + ", " + roles + ", " +
         text_of(call.request.signature.shape) + ", " + std::to_string(call.request.parts()) +
         ") in planned set " + std::to_string(call.set) + " ends with outcome " +
         std::to_string(outcome) + ", allowed " + std::to_string(allowed));
  }
  known_outcome = outcome;
  if (outcome == kPeerGone) world_.check_in_time(state(index).begun_ns);
}

void SimulatedRank::check_result(int index) {
  State& made = state(index);
  const PlannedCall& call = planned(index);
  const int member = program_.sets[static_cast<size_t>(call.set)].member_of(topology.rank);
  for (size_t i = 0; i < made.handles.size(); ++i) {
    const auto expected = result_of(program_, index, member, i);
    if (!expected) continue;
    const std::byte* output = made.out.at(i) != 0 ? made.outputs[i].data() : nullptr;
    if (!output) {
      runtime_->handles().look(made.handles[i], [&](const auto& ended) {
        output = ended.output;
        int64_t count = 1;
        for (int64_t n : ended.shape) count *= n;
        CHECK_EQ(count, expected->size());
      });
    }
    if (!expected->empty() &&
        std::memcmp(output, expected->data(), expected->size() * sizeof(int32_t)) != 0) {
      fail("call " + std::to_string(index) + ": a wrong number in tensor " + std::to_string(i));
    }
  }
}

// ---- The rest of a program

void SimulatedRank::join(int planned_set) {
  if (!known(planned_set)) return;
  farandole_request raw{};
  raw.op = FARANDOLE_JOIN;
  raw.device = kCpuDevice;
  raw.process_set = ids_.at(planned_set);
  raw.prescale = raw.postscale = 1;
  std::vector<Handle> handles(1);
  const uintptr_t nothing = 0;
  try {
    const CheckedCall prepared = runtime_->prepare({&raw, 1}, 1);
    PreparedSubmission one{&prepared, {&nothing, 1}, {&nothing, 1}, {}, handles};
    world_.joins();
    runtime_->submit({&one, 1});
  } catch (const Error& error) {
    CHECK((outcome_of(error.code()) & (kPeerGone | kInvalid)) != 0);
    return;
  }
  Failure failure;
  while (runtime_->driver().wait(handles, Deadline::never(), failure, true) == WaitEnd::kTimeIsUp) {
  }
  CHECK(!failure || (outcome_of(failure.code) & (kPeerGone | kInvalid)) != 0);
  runtime_->handles().release(handles.front());
}

void SimulatedRank::sync(int64_t number) {
  constexpr int64_t kLook = 50'000'000;
  world_.reach(topology.rank, number);
  while (!world_.passed(number) && !runtime_->broken())
    world_.kernel().sleep_for(World::kSyncs, now_ns() + kLook);
}

void SimulatedRank::leave(bool failed) {
  const auto& actions = program_.actions[static_cast<size_t>(topology.rank)];
  leaves_ = true;
  early_ = next_action_ + 1 < actions.size();
  if (failed) world_.job_breaks(topology.rank);
  if (!failed) world_.reach(topology.rank, std::numeric_limits<int64_t>::max());
  const std::string why = failed ? "ValueError: planned" : "";
  std::optional<Failure> gave_up;
  while (!(gave_up = runtime_->leave(failed, why, Deadline::never()))) {
  }
  if (*gave_up && !world_.troubled()) fail("leaves alone: " + gave_up->text);
  while (!under_way_.empty()) finish(*under_way_.begin());
}

}  // namespace farandole::simulation
