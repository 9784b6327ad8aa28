// SPDX-License-Identifier: Apache-2.0
// All settings in one table: name, default, meaning and scope (rank or job). Only config.cc reads the environment.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <variant>
#include <vector>

namespace farandole {

// Source of a variable's value. Each source overrides the sources that precede it in this list.
enum class Source { kDefault, kTuning, kEnvironment, kRankZero };
const char* text_of(Source source);

struct Config {
  // Job-wide settings: rank 0's values apply to all ranks
  int64_t fusion_bytes;
  int64_t block_bytes;
  int64_t staging_slots;
  int64_t cache_capacity;
  int64_t max_process_sets;
  double stall_warn;   // seconds; 0 means never
  double stall_abort;  // seconds; 0 means never
  double init_timeout;
  double shutdown_timeout;
  double peer_timeout;
  std::string wire;       // the transport between hosts
  std::string interface;  // in the format of addresses_of() in lib/net/interfaces.h
  std::string flight_dir;
  std::string timeline;
  int64_t timeline_mark_cycles;
  int64_t check_numerics;
  std::string call_sites;
  int64_t gpu_fusion_bytes;
  std::string gpu_backend;
  std::string shared_gpu;
  std::string gpu_order;
  std::string nccl_algo;
  // Settings that each rank has for itself
  int64_t spin_us;  // -1 if Spin decides from the number of cores
  std::string priority;
  std::string log_level;
  std::string log_format;
  int64_t log_rate;  // lines a second
  std::string death_watch;
  std::string cuda_library;
  std::string nccl_library;
  std::string nvrtc_library;
  std::string nvtx_library;
  std::string nvtx;      // if not empty, a profiler's timeline shows names
  int64_t stack_signal;  // -1 for the highest free real-time signal, 0 for none
  // Settings that only the Python package reads
  std::string rendezvous;
  std::string job_secret;
  std::string job_secret_file;
  int64_t trust_network;
  int64_t rank;
  int64_t size;
  std::string checkpoint_dir;
  double grace;
  double checkpoint_seconds;
  int64_t verify_every;

  // Seconds without progress after which a wire or a GPU library ends a bucket; 0: never. The stall monitor's error comes
  // first, because it can name the rank: a waiting rank reports its bucket every stall_abort / 4, and a silent member has
  // 1.5 s to stall_abort / 4 to answer, so the monitor has decided after 1.75 * stall_abort + 1.6 s.
  double silence_limit() const {
    constexpr double kMonitorSeconds = 2;
    return stall_abort > 0 ? 2 * stall_abort + kMonitorSeconds : 0;
  }

  std::vector<std::string> library_folders;  // folders of Python packages with GPU libraries
  std::string tuning;                        // path of the tuning file that was read
  std::vector<Source> sources;               // one per row of variables()
};

// Allowed values of a variable: a number from `least` to `most`, or one of the texts in `choices`, which are separated
// by ", ". If `choices` is "", any text is allowed.
struct Limits {
  int64_t least = 0;
  int64_t most = INT64_MAX;
  const char* choices = "";
};

struct Variable {
  const char* name;
  const char* alias;  // Horovod's name for the same setting, or ""
  const char* fallback;
  const char* meaning;
  bool job_wide;
  std::variant<int64_t Config::*, double Config::*, std::string Config::*> field;
  Limits limits = {};

  // Sizes may end in K, M or G. Throws Error(kInvalidArgument) with the variable's name if the text is invalid.
  void set(Config& config, const std::string& text) const;
  std::string get(const Config& config) const;
};

std::span<const Variable> variables();

// Reads each variable from the environment, otherwise from the tuning file, otherwise takes its default.
Config read_config();

// The job-wide values as text, one per line. In init(), the other ranks apply the text of rank 0.
std::string job_wide_text(const Config& config);
void apply_job_wide_text(Config& config, const std::string& text);

}  // namespace farandole
