// SPDX-License-Identifier: Apache-2.0
#include "runtime/submitter.h"

#include <algorithm>
#include <exception>
#include <set>
#include <utility>

#include "base/abi.h"
#include "base/error.h"
#include "runtime/calls/numerics.h"

namespace farandole {
namespace {

// A bucket takes two round trips where a report with its input takes one, and costs less than many of these. Many,
// or one that moves in a bucket anyway: the others go with it, so that all ranks add them in the same order.
bool rides_along(std::span<const Submitter::Prepared> batch) {
  constexpr size_t kMany = 8;
  return batch.size() < kMany && std::ranges::all_of(
                                     batch,
                                     [](const Submitter::Prepared& one) {
                                       return one.call->submission.recorded.bytes <= kTinyBytes;
                                     });
}

Submission submission_of(const Submitter::Prepared& prepared) {
  Submission submission = prepared.call->submission;
  submission.input = static_cast<const std::byte*>(prepared.input);
  submission.output = static_cast<std::byte*>(prepared.output);
  submission.stream = prepared.stream;
  return submission;
}

}  // namespace

void Submitter::check_open() const {
  if (closed_) {
    throw Error(ErrorCode::kShutdown, "this rank has shut down; call init() first");
  }
  if (!calls_.job.broken()) return;
  throw Error(calls_.job.failure().code, calls_.job.failure().text);
}

// Fills in what the recorder shows of a call. Each name is stored once, however often it is used.
void Submitter::describe(CheckedCall& checked) {
  const Signature& signature = checked.request.signature;
  RecordedCall& recorded = checked.submission.recorded;
  recorded.name = recorder_.label_of(checked.request.name);
  recorded.set = checked.request.set;
  recorded.op = signature.op;
  recorded.dtype = signature.dtype;
  recorded.peer = checked.request.peer;
  recorded.tag = checked.request.tag;
  if (!signature.traits().moves_bytes()) return;
  recorded.bytes = size_of(signature.dtype);
  for (int64_t n : checked.submission.shape) recorded.bytes *= static_cast<uint64_t>(n);
}

// `rides`: its input may travel in the report.
Handle Submitter::enter(const Request& request, Submission submission, bool rides) {
  if (!gets_result(request.signature, own_)) submission.output = nullptr;
  submission.handle =
      calls_.handles.create(submission.recorded.name, submission.device != kCpuDevice);
  submission.recorded.call = submission.handle;
  Handle handle = submission.handle;
  const bool paired = request.signature.traits().paired();
  uint64_t sequence = 0;
  if (paired) {
    sequence = calls_.posted.next();
  } else if (request.name.empty()) {
    sequence = calls_.pending.next_unnamed(request.set, submission.index_in_group);
  }
  recorder_.submitted(submission.recorded, sequence, submission.shape);
  if (request.signature.op == Op::kJoin) {
    ProcessSet& set = calls_.sets.own(request.set);
    set.join = submission.recorded;
    set.join_told = false;
    calls_.tell_join(request.set);
    return handle;
  }
  Contribution given = contribution_of(request, submission, own_);
  if (!rides) given.has_payload = false, given.payload = {};
  if (paired) {
    calls_.posted.add(std::move(submission));
    calls_.reporter.pass(Post{request, sequence, std::move(given)});
    return handle;
  }
  if (const uint32_t id = calls_.pending.submit_known(request, submission)) {
    calls_.reporter.pass_known(id, std::move(given));
    return handle;
  }
  if (auto news = calls_.pending.submit(request, std::move(submission), std::move(given))) {
    calls_.reporter.pass(*news);
  }
  return handle;
}

std::vector<Handle> Submitter::submit(std::span<const farandole_request> requests) {
  std::vector<Handle> handles;
  Failure unsound;
  if (check_numerics_) unsound = numerics_of(requests, own_);
  std::exception_ptr error, no_gpu;
  try {
    gpus_.open(requests);
  } catch (const Error&) {
    no_gpu = std::current_exception();
  }
  {
    std::lock_guard lock(calls_.mutex);
    check_open();
    try {
      if (unsound) throw Error(unsound.code, unsound.text);
      if (no_gpu) std::rethrow_exception(no_gpu);
      std::vector<CheckedCall> checked = take_in_all(requests);
      std::vector<Submission*> submissions;
      for (CheckedCall& one : checked) submissions.push_back(&one.submission);
      gpus_.mark_produced(submissions);
      for (CheckedCall& one : checked) {
        handles.push_back(enter(one.request, std::move(one.submission)));
      }
    } catch (const NameTaken& e) {
      refuse_all(requests, {e.code(), e.what()}, true);
      error = std::current_exception();
    } catch (const Error& e) {
      refuse_all(requests, {e.code(), e.what()}, false);
      error = std::current_exception();
    }
    calls_.reporter.pass_batch();
  }
  driver_.after_submit();
  if (error) std::rethrow_exception(error);
  return handles;
}

CheckedCall Submitter::take_in_one(const farandole_request& request) {
  CheckedCall checked = check_request(request, calls_.sets, own_);
  checked.request.signature.window_range = gpus_.window_range_of(checked.request);
  describe(checked);
  return checked;
}

std::vector<CheckedCall> Submitter::take_in_all(std::span<const farandole_request> requests) {
  std::vector<CheckedCall> all;
  std::set<std::pair<SetId, std::string>> names;
  for (const farandole_request& request : requests) {
    all.push_back(take_in_one(request));
    if (requests.size() > 1 && all.back().request.name.empty()) name_group(all, requests.size());
    const Request& taken = all.back().request;
    check_buffers(taken, all.back().submission, calls_.sets.own(taken.set));
    const bool paired = taken.signature.traits().paired();  // its name does not identify it
    if (!paired) calls_.pending.check_free(taken, all.back().submission, all.back().record);
    if (!taken.name.empty() && !names.emplace(taken.set, taken.name).second) {
      throw Error(ErrorCode::kInvalidArgument,
                  "'" + taken.name + "' is twice in one group; give each tensor its own name");
    }
    if ((taken.signature.op == Op::kJoin || paired) && requests.size() > 1) {
      throw Error(ErrorCode::kInvalidArgument, std::string(name_of(taken.signature.op)) +
                                                   " can't be one of several calls of a group");
    }
  }
  return all;
}

// Names an unnamed group by its place in the order. The names repeat, so that ranks don't have to exchange
// ever new ones.
void Submitter::name_group(std::vector<CheckedCall>& all, size_t size) {
  constexpr uint64_t kNames = 256;
  CheckedCall& checked = all.back();
  const uint64_t number = calls_.pending.next_unnamed(checked.request.set) % kNames;
  checked.request.group = "unnamed group " + std::to_string(number);
  checked.request.signature.group_size = static_cast<int32_t>(size);
  checked.submission.index_in_group = all.size() - 1;
}

CheckedCall Submitter::make_persistent(const farandole_request& request) {
  gpus_.open({&request, 1});
  std::lock_guard lock(calls_.mutex);
  check_open();
  CheckedCall checked = take_in_one(request);
  const ReduceOpTraits& reduction = traits_of(checked.request.signature.reduce_op);
  if (reduction.declared) {
    throw Error(
        ErrorCode::kInvalidArgument,
        std::string(reduction.name) + " can be declared, but not persistent: it has no kernel");
  }
  checked.submission.persistent = ++persistent_;
  return checked;
}

// Peers' calls fail with the same text as an argument error, or a NaN before it can spread.
void Submitter::submit(std::span<Prepared> batch) {
  size_t sound = batch.size();
  Failure unsound;
  for (size_t i = 0; check_numerics_ && !unsound && i < batch.size(); ++i) {
    unsound = numerics_of(batch[i].call->request, submission_of(batch[i]), own_);
    if (unsound) sound = i;
  }
  std::exception_ptr error;
  {
    std::lock_guard lock(calls_.mutex);
    check_open();
    const bool rides = rides_along(batch);
    try {
      for (Prepared& one : batch.first(sound)) one.handle = enter(one, rides);
      if (unsound) {
        refuse_locked(batch[sound].call->request, unsound);
        throw Error(unsound.code, unsound.text);
      }
    } catch (...) {
      error = std::current_exception();
    }
    calls_.reporter.pass_batch();
  }
  driver_.after_submit();
  if (error) std::rethrow_exception(error);
}

Handle Submitter::enter(const Prepared& prepared, bool rides) {
  const Request& request = prepared.call->request;
  Submission submission = submission_of(prepared);
  const ProcessSet& set = working_set(request, calls_.sets);
  if (!request.signature.traits().paired()) {
    calls_.pending.check_free(request, submission, prepared.call->record);
  }
  try {
    check_buffers(request, submission, set);
    gpus_.window_range_of(request);
    Submission* one = &submission;
    gpus_.mark_produced({&one, 1});
    return enter(request, std::move(submission), rides);
  } catch (const Error& e) {
    refuse_locked(request, {e.code(), e.what()});
    throw;
  }
}

void Submitter::refuse(const farandole_request& request, const Failure& why) {
  {
    std::lock_guard lock(calls_.mutex);
    check_open();
    refuse_locked(name_of_request(request), why);
  }
  driver_.after_submit();
}

int64_t Submitter::count_unnamed(SetId set) {
  std::lock_guard lock(calls_.mutex);
  check_open();
  return static_cast<int64_t>(calls_.pending.next_unnamed(set));
}

// Peers that wait for this name fail, too. If a call of the name is in flight, they learn of it after that
// call; a refused join() is reported when this rank joins, because all ranks have to.
void Submitter::refuse_locked(const Request& request, const Failure& why) {
  ProcessSet* set = calls_.sets.find(request.set);
  if (!set || set->member < 0 || set->joined() || is_pair(request.set)) return;
  Failure failure{why.code, "rank " + std::to_string(own_) + " refused: " + why.text};
  if (request.signature.op == Op::kJoin) {
    set->join_failure = std::move(failure);
    return;
  }
  if (request.signature.traits().paired()) return refuse_message(request, std::move(failure));
  if (auto news = calls_.pending.refuse(request, std::move(failure))) {
    calls_.reporter.pass(*news);
  }
}

// Only the rank at the other end is told, if it is known which that is.
void Submitter::refuse_message(const Request& request, Failure why) {
  const ProcessSet& set = *calls_.sets.find(request.set);
  const bool any = request.peer == kAnyRank && request.signature.traits().end == End::kReceiver;
  const bool known = any || (set.member_of(request.peer) >= 0 && request.peer != own_);
  if (!known || request.tag < 0) return;
  calls_.reporter.pass(Post{request, calls_.posted.skip(), {}, std::move(why)});
}

// A repeated name is one call for the peers, and refusing the first call of a group refuses the group.
// `free_only`: skip names in flight.
void Submitter::refuse_all(std::span<const farandole_request> requests, const Failure& why,
                           bool free_only) {
  std::set<std::pair<SetId, std::string>> names;
  for (const farandole_request& request : requests) {
    const Request known = name_of_request(request);
    if (!names.emplace(known.set, known.name).second) continue;
    if (!free_only || !calls_.pending.in_flight(known)) refuse_locked(known, why);
    if (request.group && known.name == request.group) return;
  }
}

}  // namespace farandole
