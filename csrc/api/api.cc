// SPDX-License-Identifier: Apache-2.0
// The C ABI: finds the runtime, calls it, and turns exceptions into codes and text.
#include "api/api_entry.h"

#include "base/build_id.h"

using namespace farandole;

FARANDOLE_API const char* farandole_version(void) { return version(); }
FARANDOLE_API const char* farandole_build_id(void) { return build_id(); }
FARANDOLE_API const char* farandole_error(void) { return last_error; }

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
    auto started = std::make_shared<Runtime>(
        std::move(*door), Topology::of(world->rank, std::move(node)), cards, world->mpi_comm);
    std::lock_guard lock(process().mutex);
    process().runtime = std::move(started);
    return FARANDOLE_OK;
  });
}

FARANDOLE_API int32_t farandole_shutdown(int32_t failed, const char* text, double seconds) {
  return guarded([&]() -> int32_t {
    std::shared_ptr<Runtime> leaving;
    {
      std::lock_guard lock(process().mutex);
      process().door.reset();
      leaving = process().runtime;
    }
    if (!leaving) return FARANDOLE_OK;
    if (!leaving->leave(failed != 0, text ? text : "", deadline_in(seconds))) {
      return FARANDOLE_PENDING;
    }
    std::lock_guard lock(process().mutex);
    if (process().runtime == leaving) process().runtime.reset();
    std::lock_guard kept_lock(process().kept_mutex);
    process().kept.clear();
    return FARANDOLE_OK;
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
  return guarded([&]() -> int32_t {
    auto here = runtime();
    const Topology& t = here->topology();
    *out = {t.rank,       t.size,       t.local_rank,         t.local_size(),
            t.cross_rank, t.cross_size, t.homogeneous ? 1 : 0};
    return FARANDOLE_OK;
  });
}

FARANDOLE_API void farandole_forked(void) {
  // No lock: the thread that held it does not exist here.
  if (!process().forked.exchange(true) && process().runtime) process().runtime->forked();
}

FARANDOLE_API int32_t farandole_submit(const farandole_request* requests, int32_t count,
                                       int64_t* handles) {
  return guarded([&]() -> int32_t {
    std::vector<Handle> made = runtime()->submit({requests, static_cast<size_t>(count)});
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
  return guarded(
      [&] { return wait_in(*runtime(), {handles, static_cast<size_t>(count)}, seconds); });
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
  return guarded([&]() -> int32_t {
    runtime()->handles().look(handle, [&](const Outcome& outcome) {
      *out = {outcome.output,
              outcome.absent ? 1 : 0,
              static_cast<int32_t>(outcome.shape.size()),
              outcome.shape.data(),
              static_cast<int32_t>(outcome.received.size()),
              outcome.received.data(),
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
    runtime()->handles().release_all({handles, static_cast<size_t>(count)});
    return FARANDOLE_OK;
  });
}

FARANDOLE_API void* farandole_take(int64_t handle) {
  std::byte* memory = nullptr;
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
    std::copy_n(found.begin(), std::min<size_t>(found.size(), static_cast<size_t>(capacity)),
                ranks);
    return static_cast<int32_t>(found.size());
  });
}

FARANDOLE_API int32_t farandole_variables(farandole_variable* rows, int32_t capacity) {
  return negated([&]() -> int32_t {
    thread_local auto* values = new std::vector<std::string>;
    std::shared_ptr<Runtime> here;
    {
      std::lock_guard lock(process().mutex);
      here = process().runtime;
    }
    Config config = here ? here->config() : read_config();
    auto table = variables();
    values->clear();
    for (const Variable& variable : table) values->push_back(variable.get(config));
    for (size_t i = 0; i < std::min(table.size(), static_cast<size_t>(capacity)); ++i) {
      rows[i] = {table[i].name,
                 table[i].alias,
                 table[i].fallback,
                 table[i].meaning,
                 (*values)[i].c_str(),
                 table[i].job_wide ? 1 : 0,
                 text_of(config.sources[i])};
    }
    return static_cast<int32_t>(table.size());
  });
}

FARANDOLE_API int32_t farandole_counters(farandole_counter* rows, int32_t capacity) {
  return negated([&]() -> int32_t {
    std::shared_ptr<Runtime> here;
    {
      std::lock_guard lock(process().mutex);
      here = process().runtime;
    }
    const farandole_counter counters[] = {
        {"rescued_wakeups", static_cast<int64_t>(rescued_wakeups())},
        {"mapped_bytes", here ? static_cast<int64_t>(here->mapped_bytes()) : 0},
        {"sleeps", here ? static_cast<int64_t>(here->sleeps()) : 0},
    };
    size_t n = std::min(std::size(counters), static_cast<size_t>(capacity));
    std::copy_n(counters, n, rows);
    return static_cast<int32_t>(std::size(counters));
  });
}
