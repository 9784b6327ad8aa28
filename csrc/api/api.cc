// SPDX-License-Identifier: Apache-2.0
// The C ABI: finds the runtime, calls it, and turns exceptions into codes and text.
#include "api/api_entry.h"

#include "base/build_id.h"

using namespace farandole;

FARANDOLE_API const char* farandole_version(void) { return version(); }
FARANDOLE_API const char* farandole_build_id(void) { return build_id(); }
FARANDOLE_API const char* farandole_error(void) { return last_error; }
FARANDOLE_API int32_t farandole_error_code(void) { return static_cast<int32_t>(last_code); }

FARANDOLE_API int32_t farandole_stack_signal(void) {
  return negated([&]() -> int32_t {
    const int64_t wanted = read_config().stack_signal;
    return wanted >= 0 ? static_cast<int32_t>(wanted) : free_signal();
  });
}

FARANDOLE_API void farandole_stacks(int32_t signal, int32_t pipe) {
  make_harmless(signal);
  std::lock_guard lock(process().mutex);
  process().stacks = {signal, pipe};
}

FARANDOLE_API int32_t farandole_prepare(char* blob, int32_t capacity) {
  return negated([&]() -> int32_t {
    std::lock_guard lock(process().mutex);
    if (process().runtime) throw Error(ErrorCode::kInvalidArgument, "init() was called already");
    if (process().departure) {
      throw Error(ErrorCode::kInvalidArgument, "the last shutdown() has not ended yet");
    }
    Config config = read_config();
    config.library_folders = process().library_folders;
    process().door =
        std::make_unique<Door>(std::move(config), process().stacks, process().arenas.share());
    ByteString card = process().door->card();
    if (card.size() > static_cast<size_t>(std::max(capacity, 0))) {
      throw Error(ErrorCode::kInvalidArgument,
                  "the card takes " + std::to_string(card.size()) + " bytes");
    }
    std::memcpy(blob, card.data(), card.size());
    return static_cast<int32_t>(card.size());
  });
}

namespace {

std::vector<Card> cards_of(const farandole_world* world) {
  std::vector<Card> cards;
  for (int32_t r = 0; r < world->size; ++r) {
    cards.push_back(Card::decode({reinterpret_cast<const std::byte*>(world->blobs[r]),
                                  static_cast<size_t>(world->blob_bytes[r])}));
  }
  return cards;
}

}  // namespace

FARANDOLE_API int32_t farandole_knock(const farandole_world* world) {
  return negated([&]() -> int32_t {
    std::lock_guard lock(process().mutex);
    if (!process().door) throw Error(ErrorCode::kInvalidArgument, "farandole_prepare comes first");
    return process().door->knock(world->rank, {world->node, world->node + world->size},
                                 cards_of(world));
  });
}

FARANDOLE_API int32_t farandole_start(const farandole_world* world) {
  return guarded([&]() -> int32_t {
    std::unique_ptr<Door> door;
    {
      std::lock_guard lock(process().mutex);
      door = std::move(process().door);
    }
    if (!door) throw Error(ErrorCode::kInvalidArgument, "farandole_prepare comes first");
    std::vector<Rank> node(world->node, world->node + world->size);
    const std::vector<Card> cards = cards_of(world);
    auto departure = std::make_shared<Departure>();
    std::shared_ptr<Runtime> started(
        new Runtime(std::move(*door), Topology::of(world->rank, std::move(node)), cards,
                    world->mpi_comm),
        [departure](const Runtime* runtime) {
          delete runtime;
          departure->tell();
        });
    std::lock_guard lock(process().mutex);
    process().runtime = std::move(started);
    process().departure = std::move(departure);
    return FARANDOLE_OK;
  });
}

FARANDOLE_API int32_t farandole_shutdown(int32_t failed, const char* text, double seconds) {
  return guarded([&]() -> int32_t {
    const Deadline deadline = deadline_in(seconds);
    std::shared_ptr<Runtime> leaving;
    std::shared_ptr<Departure> departure;
    {
      std::lock_guard lock(process().mutex);
      process().door.reset();
      leaving = process().runtime;
      departure = process().departure;
    }
    if (leaving) {
      if (!leaving->leave(failed != 0, text ? text : "", deadline)) return FARANDOLE_PENDING;
      std::lock_guard lock(process().mutex);
      departure->failure = leaving->gave_up();
      if (process().runtime == leaving) process().runtime.reset();
      std::lock_guard kept_lock(process().kept_mutex);
      process().kept.clear();
    }
    if (!departure) return FARANDOLE_OK;
    // The guarantee that nobody touches the user's buffers, or MPI, after a shutdown: the runtime is not
    // only out of reach but destroyed, which joins its threads and ends its lanes and planes; and every
    // caller that might still drive them, in farandole_wait or elsewhere, holds a reference to it until it
    // is out, by whatever way. All they wait for has failed, so they are out soon.
    leaving.reset();
    if (!departure->await(deadline)) return FARANDOLE_PENDING;
    {
      std::lock_guard lock(process().mutex);
      if (process().departure == departure) process().departure.reset();
    }
    const Failure& failure = departure->failure;
    return failure ? set_error(failure.code, failure.text.c_str()) : FARANDOLE_OK;
  });
}

FARANDOLE_API int32_t farandole_initialized(void) {
  if (process().forked) return 0;
  std::lock_guard lock(process().mutex);
  return process().runtime != nullptr;
}

FARANDOLE_API int32_t farandole_broken(void) {
  if (process().forked) return 0;
  std::lock_guard lock(process().mutex);
  return process().runtime && process().runtime->broken();
}

FARANDOLE_API int32_t farandole_where(farandole_topology* out) {
  return translated([&]() -> int32_t {
    if (process().forked && !runtime_if_any()) throw forked_error();
    auto here = runtime();
    const Topology& t = here->topology();
    *out = {t.rank,       t.size,       t.local_rank,         t.local_size(),
            t.cross_rank, t.cross_size, t.homogeneous ? 1 : 0};
    return FARANDOLE_OK;
  });
}

FARANDOLE_API void farandole_forked(void) {
  if (process().forked.exchange(true)) return;
  if (auto parents = runtime_if_any()) parents->forked();
}

FARANDOLE_API int32_t farandole_submit(const farandole_request* requests, int32_t count,
                                       int64_t* handles) {
  return guarded([&]() -> int32_t {
    std::vector<Handle> made = runtime()->submit(span_of(requests, count));
    std::copy(made.begin(), made.end(), handles);
    return FARANDOLE_OK;
  });
}

FARANDOLE_API int64_t farandole_tensor(const farandole_request* request) {
  return negated([&]() -> int64_t {
    auto here = runtime();
    Asked asked = here->keep(*request);
    auto kept = std::make_shared<const Kept>(Kept{std::move(here), std::move(asked)});
    std::lock_guard lock(process().mutex);
    if (process().runtime != kept->runtime) {
      throw Error(ErrorCode::kShutdown, "this rank has shut down; call init() first");
    }
    std::lock_guard kept_lock(process().kept_mutex);
    const int64_t number = process().next_kept++;
    process().kept.emplace(number, std::move(kept));
    return number;
  });
}

FARANDOLE_API int64_t farandole_submit_tensor(int64_t tensor, uintptr_t input, uintptr_t output) {
  return farandole_submit_buffer(tensor, reinterpret_cast<const void*>(input),
                                 reinterpret_cast<void*>(output));
}

FARANDOLE_API int64_t farandole_submit_buffer(int64_t tensor, const void* input, void* output) {
  return negated([&]() -> int64_t {
    const auto known = kept(tensor);
    return known->runtime->submit(known->asked, input, output);
  });
}

FARANDOLE_API int32_t farandole_submit_buffers(const int64_t* tensors, const uintptr_t* buffers,
                                               int32_t count, int64_t* handles) {
  return guarded([&]() -> int32_t {
    for (int32_t i = 0; i < count; ++i) {
      const auto known = kept(tensors[i]);
      void* const buffer = reinterpret_cast<void*>(buffers[i]);
      handles[i] = known->runtime->submit(known->asked, buffer, buffer);
    }
    return FARANDOLE_OK;
  });
}

FARANDOLE_API void farandole_forget_tensor(int64_t tensor) {
  if (process().forked) return;
  std::lock_guard lock(process().kept_mutex);
  process().kept.erase(tensor);
}

FARANDOLE_API int32_t farandole_refuse(const farandole_request* request, int32_t code,
                                       const char* text) {
  return guarded([&]() -> int32_t {
    runtime()->refuse(*request, {static_cast<ErrorCode>(code), text});
    return FARANDOLE_OK;
  });
}

FARANDOLE_API int64_t farandole_count_unnamed(int32_t process_set) {
  return negated([&]() -> int64_t { return runtime()->count_unnamed(process_set); });
}

FARANDOLE_API int32_t farandole_poll(int64_t handle) {
  return negated([&]() -> int32_t { return runtime()->done(handle); });
}

namespace {

int32_t wait_in(Runtime& here, std::span<const Handle> handles, double seconds) {
  Failure failure;
  switch (here.wait(handles, deadline_in(seconds), failure)) {
    case WaitEnd::kDone: return FARANDOLE_OK;
    case WaitEnd::kTimeIsUp: return FARANDOLE_PENDING;
    case WaitEnd::kFailed: break;
  }
  return set_error(failure.code, failure.text.c_str());
}

}  // namespace

FARANDOLE_API int32_t farandole_wait(const int64_t* handles, int32_t count, double seconds) {
  return guarded([&] { return wait_in(*runtime(), span_of(handles, count), seconds); });
}

FARANDOLE_API int32_t farandole_finish(int64_t handle, double seconds) {
  return guarded([&] {
    const auto here = runtime();
    const int32_t code = wait_in(*here, {&handle, 1}, seconds);
    if (code == FARANDOLE_OK) here->handles().release(handle);
    return code;
  });
}

FARANDOLE_API int32_t farandole_explain(int64_t handle, double seconds, char* text,
                                        int32_t capacity) {
  return negated([&]() -> int32_t {
    const std::string found = runtime()->explain(handle, deadline_in(seconds));
    const size_t room = static_cast<size_t>(std::max(capacity, 1)) - 1;
    const size_t length = found.copy(text, room);
    if (capacity > 0) text[length] = '\0';
    return static_cast<int32_t>(found.size());
  });
}

FARANDOLE_API int32_t farandole_result_of(int64_t handle, farandole_result* out) {
  // What it points at is the asking thread's: the handle, and the runtime with it, may go at any time.
  thread_local std::vector<int64_t> shape, received;
  return guarded([&]() -> int32_t {
    runtime()->handles().look(handle, [&](const Outcome& outcome) {
      shape.assign(outcome.shape.begin(), outcome.shape.end());
      received = outcome.received;
      *out = {outcome.output,
              outcome.absent ? 1 : 0,
              static_cast<int32_t>(shape.size()),
              shape.data(),
              static_cast<int32_t>(received.size()),
              received.data(),
              outcome.value};
    });
    return FARANDOLE_OK;
  });
}

FARANDOLE_API void farandole_release(int64_t handle) {
  guarded([&]() -> int32_t {
    runtime()->handles().release(handle);
    return FARANDOLE_OK;
  });
}

FARANDOLE_API void farandole_release_all(const int64_t* handles, int32_t count) {
  guarded([&]() -> int32_t {
    runtime()->handles().release_all(span_of(handles, count));
    return FARANDOLE_OK;
  });
}

FARANDOLE_API void* farandole_take(int64_t handle) {
  std::byte* memory = nullptr;
  last_code = ErrorCode::kOk;
  guarded([&]() -> int32_t {
    OwnedMemory taken = runtime()->handles().take(handle);
    if (taken.get_deleter().device) {
      std::lock_guard lock(process().on_gpu_mutex);
      process().on_gpu[taken.get()] = taken.get_deleter().device;
    }
    memory = taken.release();
    return FARANDOLE_OK;
  });
  return memory;
}

FARANDOLE_API void farandole_free(void* memory) {
  FreeMemory{nullptr}(static_cast<std::byte*>(memory));
}

FARANDOLE_API int32_t farandole_set_ranks(int32_t process_set, int32_t* ranks, int32_t capacity) {
  return negated([&]() -> int32_t {
    std::vector<Rank> found = runtime()->ranks_of(process_set);
    if (const size_t rows = rows_in(capacity, found.size())) {
      std::copy_n(found.begin(), rows, ranks);
    }
    return static_cast<int32_t>(found.size());
  });
}

FARANDOLE_API int32_t farandole_variables(farandole_variable* rows, int32_t capacity) {
  thread_local std::vector<std::string> values;
  return negated([&]() -> int32_t {
    const auto here = runtime_if_any();
    Config config = here ? here->config() : read_config();
    auto table = variables();
    values.clear();
    for (const Variable& variable : table) values.push_back(variable.get(config));
    for (size_t i = 0; i < rows_in(capacity, table.size()); ++i) {
      rows[i] = {table[i].name,
                 table[i].alias,
                 table[i].fallback,
                 table[i].meaning,
                 values[i].c_str(),
                 table[i].job_wide ? 1 : 0,
                 text_of(config.sources[i])};
    }
    return static_cast<int32_t>(table.size());
  });
}

FARANDOLE_API int32_t farandole_counters(farandole_counter* rows, int32_t capacity) {
  return negated([&]() -> int32_t {
    const auto here = runtime_if_any();
    const farandole_counter counters[] = {
        {"rescued_wakeups", static_cast<int64_t>(rescued_wakeups())},
        {"mapped_bytes", here ? static_cast<int64_t>(here->mapped_bytes()) : 0},
        {"sleeps", here ? static_cast<int64_t>(here->sleeps()) : 0},
    };
    if (const size_t n = rows_in(capacity, std::size(counters))) std::copy_n(counters, n, rows);
    return static_cast<int32_t>(std::size(counters));
  });
}
