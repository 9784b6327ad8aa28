// SPDX-License-Identifier: Apache-2.0
// What callers hand in: checked, noted, and reported.
#include <exception>
#include <set>
#include <utility>

#include "base/abi.h"
#include "base/error.h"
#include "runtime/calls/numerics.h"
#include "runtime/runtime.h"

namespace farandole {

void Runtime::check_open() const {
  if (leaving_) {
    throw Error(ErrorCode::kShutdown, "this rank has shut down; call init() first");
  }
  if (!engine_->broken()) return;
  throw Error(engine_->failure().code, engine_->failure().text);
}

Handle Runtime::enter(const Request& request, Submission submission) {
  submission.handle = handles().create(submission.recorded.name, submission.device != kCpuDevice);
  submission.recorded.call = submission.handle;
  Handle handle = submission.handle;
  const uint64_t sequence = request.name.empty() ? engine_->pending().next_unnamed(request.set) : 0;
  recorder_->submitted(submission.recorded, sequence, submission.shape);
  if (request.signature.op == Op::kJoin) {
    engine_->sets().own(request.set).join = handle;
    engine_->pass(Join{request.set}, handle);
    return handle;
  }
  Contribution given = contribution_of(request, submission, topology_.rank);
  if (const uint32_t id = engine_->pending().submit_known(request, submission)) {
    engine_->pass_known(id, std::move(given), handle);
    return handle;
  }
  if (auto news = engine_->pending().submit(request, std::move(submission), std::move(given))) {
    engine_->pass(std::move(*news), handle);
  }
  return handle;
}

std::vector<Handle> Runtime::submit(std::span<const farandole_request> requests) {
  std::vector<Handle> handles;
  Failure unsound;
  if (config_.check_numerics != 0) unsound = numerics_of(requests, topology_.rank);
  std::exception_ptr error, no_gpu;
  try {
    open_gpu(requests);
  } catch (const Error&) {
    no_gpu = std::current_exception();
  }
  {
    std::lock_guard lock(engine_->mutex());
    check_open();
    try {
      if (unsound) throw Error(unsound.code, unsound.text);
      if (no_gpu) std::rethrow_exception(no_gpu);
      std::vector<Asked> asked = take_in_all(requests);
      std::vector<Submission*> submissions;
      for (Asked& one : asked) submissions.push_back(&one.submission);
      mark_produced(submissions);
      for (Asked& one : asked) {
        handles.push_back(enter(one.request, std::move(one.submission)));
      }
    } catch (const Error& e) {
      refuse_all(requests, {e.code(), e.what()});
      error = std::current_exception();
    }
  }
  after_submit();
  if (error) std::rethrow_exception(error);
  return handles;
}

std::vector<Asked> Runtime::take_in_all(std::span<const farandole_request> requests) {
  std::vector<Asked> all;
  std::set<std::pair<SetId, std::string>> names;
  for (const farandole_request& request : requests) {
    all.push_back(take_in(request, engine_->sets(), topology_.rank));
    all.back().request.signature.place = place_of(all.back().request);
    describe(all.back());
    const Request& taken = all.back().request;
    check_buffers(taken, all.back().submission, engine_->sets().own(taken.set));
    engine_->pending().check_free(taken, all.back().submission, all.back().record);
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

Asked Runtime::keep(const farandole_request& request) {
  open_gpu({&request, 1});
  std::lock_guard lock(engine_->mutex());
  check_open();
  Asked asked = take_in(request, engine_->sets(), topology_.rank);
  asked.request.signature.place = place_of(asked.request);
  describe(asked);
  asked.submission.kept = engine_->pending().number_kept();
  return asked;
}

Handle Runtime::submit(const Asked& kept, const void* input, void* output, uint64_t stream) {
  Handle handle = 0;
  Submission submission = kept.submission;
  submission.input = static_cast<const std::byte*>(input);
  submission.output = static_cast<std::byte*>(output);
  if (config_.check_numerics != 0) check_numerics(kept.request, submission);
  std::exception_ptr error;
  {
    std::lock_guard lock(engine_->mutex());
    check_open();
    const ProcessSet& set = working_set(kept.request, engine_->sets());
    engine_->pending().check_free(kept.request, submission, kept.record);
    submission.stream = stream;
    try {
      check_buffers(kept.request, submission, set);
      place_of(kept.request);
      Submission* one = &submission;
      mark_produced({&one, 1});
      handle = enter(kept.request, std::move(submission));
    } catch (const Error& e) {
      refuse_locked(kept.request, {e.code(), e.what()});
      error = std::current_exception();
    }
  }
  after_submit();
  if (error) std::rethrow_exception(error);
  return handle;
}

void Runtime::refuse(const farandole_request& request, const Failure& why) {
  {
    std::lock_guard lock(engine_->mutex());
    check_open();
    refuse_locked(name_of_request(request), why);
  }
  after_submit();
}

// The peers that wait for this name fail too. A name that is in flight already is not touched.
void Runtime::refuse_locked(const Request& request, const Failure& why) {
  ProcessSet* set = engine_->sets().find(request.set);
  if (!set || set->member < 0 || set->join || request.signature.op == Op::kJoin) return;
  if (engine_->pending().in_flight(request)) return;
  Failure failure{why.code, "rank " + std::to_string(topology_.rank) + " refused: " + why.text};
  if (auto news = engine_->pending().refuse(request, std::move(failure))) {
    engine_->pass(std::move(*news), 0);
  }
}

// A name that is twice among them is one call of the peers.
void Runtime::refuse_all(std::span<const farandole_request> requests, const Failure& why) {
  std::set<std::pair<SetId, std::string>> names;
  for (const farandole_request& request : requests) {
    bool named = request.name && *request.name;
    if (named && !names.emplace(request.process_set, request.name).second) continue;
    refuse_locked(name_of_request(request), why);
  }
}

}  // namespace farandole
