// SPDX-License-Identifier: Apache-2.0
#include "runtime/submitter.h"

#include <exception>
#include <set>
#include <utility>

#include "base/abi.h"
#include "base/error.h"
#include "runtime/calls/numerics.h"

namespace farandole {

void Submitter::check_open() const {
  if (closed_) {
    throw Error(ErrorCode::kShutdown, "this rank has shut down; call init() first");
  }
  if (!calls_.job.broken()) return;
  throw Error(calls_.job.failure().code, calls_.job.failure().text);
}

// What the recorder shows of a call. Names are kept once, however often they are used.
void Submitter::describe(Asked& asked) {
  const Signature& signature = asked.request.signature;
  RecordedCall& recorded = asked.submission.recorded;
  recorded.name = recorder_.label_of(asked.request.name);
  recorded.set = asked.request.set;
  recorded.op = signature.op;
  recorded.dtype = signature.dtype;
  if (!signature.traits().moves_bytes()) return;
  recorded.bytes = size_of(signature.dtype);
  for (int64_t n : asked.submission.shape) recorded.bytes *= static_cast<uint64_t>(n);
}

// Peers fail with the same text, before anything spreads.
void Submitter::check_numerics(const Request& request, const Submission& submission) {
  const Failure unsound = numerics_of(request, submission, own_);
  if (!unsound) return;
  {
    std::lock_guard lock(calls_.mutex);
    check_open();
    refuse_locked(request, unsound);
  }
  driver_.after_submit();
  throw Error(unsound.code, unsound.text);
}

Handle Submitter::enter(const Request& request, Submission submission) {
  submission.handle =
      calls_.handles.create(submission.recorded.name, submission.device != kCpuDevice);
  submission.recorded.call = submission.handle;
  Handle handle = submission.handle;
  const uint64_t sequence =
      request.name.empty() ? calls_.pending.next_unnamed(request.set, submission.place) : 0;
  recorder_.submitted(submission.recorded, sequence, submission.shape);
  if (request.signature.op == Op::kJoin) {
    ProcessSet& set = calls_.sets.own(request.set);
    set.join = handle;
    calls_.reporter.pass(Join{request.set, std::exchange(set.join_failure, {})}, handle);
    return handle;
  }
  Contribution given = contribution_of(request, submission, own_);
  if (const uint32_t id = calls_.pending.submit_known(request, submission)) {
    calls_.reporter.pass_known(id, std::move(given), handle);
    return handle;
  }
  if (auto news = calls_.pending.submit(request, std::move(submission), std::move(given))) {
    calls_.reporter.pass(std::move(*news), handle);
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
      std::vector<Asked> asked = take_in_all(requests);
      std::vector<Submission*> submissions;
      for (Asked& one : asked) submissions.push_back(&one.submission);
      gpus_.mark_produced(submissions);
      for (Asked& one : asked) {
        handles.push_back(enter(one.request, std::move(one.submission)));
      }
    } catch (const NameTaken& e) {
      refuse_all(requests, {e.code(), e.what()}, true);
      error = std::current_exception();
    } catch (const Error& e) {
      refuse_all(requests, {e.code(), e.what()}, false);
      error = std::current_exception();
    }
  }
  driver_.after_submit();
  if (error) std::rethrow_exception(error);
  return handles;
}

Asked Submitter::take_in_one(const farandole_request& request) {
  Asked asked = take_in(request, calls_.sets, own_);
  asked.request.signature.place = gpus_.place_of(asked.request);
  describe(asked);
  return asked;
}

std::vector<Asked> Submitter::take_in_all(std::span<const farandole_request> requests) {
  std::vector<Asked> all;
  std::set<std::pair<SetId, std::string>> names;
  for (const farandole_request& request : requests) {
    all.push_back(take_in_one(request));
    if (requests.size() > 1 && all.back().request.name.empty()) name_group(all, requests.size());
    const Request& taken = all.back().request;
    check_buffers(taken, all.back().submission, calls_.sets.own(taken.set));
    calls_.pending.check_free(taken, all.back().submission, all.back().record);
    if (!taken.name.empty() && !names.emplace(taken.set, taken.name).second) {
      throw Error(ErrorCode::kInvalidArgument,
                  "'" + taken.name + "' is twice in one group; give each tensor its own name");
    }
    if (taken.signature.op == Op::kJoin && requests.size() > 1) {
      throw Error(ErrorCode::kInvalidArgument, "join() can't be one of several calls");
    }
  }
  return all;
}

// A group without a name is called by its place in the order. These names come around again, so that ranks
// need not tell each other ever new ones.
void Submitter::name_group(std::vector<Asked>& all, size_t size) {
  constexpr uint64_t kNames = 256;
  Asked& asked = all.back();
  const uint64_t number = calls_.pending.next_unnamed(asked.request.set) % kNames;
  asked.request.group = "unnamed group " + std::to_string(number);
  asked.request.signature.group_size = static_cast<int32_t>(size);
  asked.submission.place = all.size() - 1;
}

Asked Submitter::keep(const farandole_request& request) {
  gpus_.open({&request, 1});
  std::lock_guard lock(calls_.mutex);
  check_open();
  Asked asked = take_in_one(request);
  const ReduceOpTraits& reduction = traits_of(asked.request.signature.reduce_op);
  if (reduction.declared) {
    throw Error(ErrorCode::kInvalidArgument,
                std::string(reduction.name) + " can be declared, but not kept: it has no kernel");
  }
  asked.submission.kept = calls_.pending.number_kept();
  return asked;
}

Handle Submitter::submit(const Asked& kept, const void* input, void* output, uint64_t stream) {
  Handle handle = 0;
  Submission submission = kept.submission;
  submission.input = static_cast<const std::byte*>(input);
  submission.output = static_cast<std::byte*>(output);
  if (check_numerics_) check_numerics(kept.request, submission);
  std::exception_ptr error;
  {
    std::lock_guard lock(calls_.mutex);
    check_open();
    const ProcessSet& set = working_set(kept.request, calls_.sets);
    calls_.pending.check_free(kept.request, submission, kept.record);
    submission.stream = stream;
    try {
      check_buffers(kept.request, submission, set);
      gpus_.place_of(kept.request);
      Submission* one = &submission;
      gpus_.mark_produced({&one, 1});
      handle = enter(kept.request, std::move(submission));
    } catch (const Error& e) {
      refuse_locked(kept.request, {e.code(), e.what()});
      error = std::current_exception();
    }
  }
  driver_.after_submit();
  if (error) std::rethrow_exception(error);
  return handle;
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

// The peers that wait for this name fail too. Where a call of that name is in flight they hear of it once that is over;
// of a join when all have joined, as this rank has to as well.
void Submitter::refuse_locked(const Request& request, const Failure& why) {
  ProcessSet* set = calls_.sets.find(request.set);
  if (!set || set->member < 0 || set->join) return;
  Failure failure{why.code, "rank " + std::to_string(own_) + " refused: " + why.text};
  if (request.signature.op == Op::kJoin) {
    set->join_failure = std::move(failure);
    return;
  }
  if (auto news = calls_.pending.refuse(request, std::move(failure))) {
    calls_.reporter.pass(std::move(*news), 0);
  }
}

// A name that is twice among them is one call of the peers. Whoever refuses the first of a group refuses all.
// free_only: but for names in flight.
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
