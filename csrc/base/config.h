// SPDX-License-Identifier: Apache-2.0
// Every variable in one table: name, default, meaning, and whether rank 0's value holds for the job.
// Nothing else in the core reads the environment; code receives values.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <variant>
#include <vector>

namespace farandole {

// What gave a variable its value, from the weakest on.
enum class Source { kDefault, kTuning, kEnvironment, kRankZero };
const char* text_of(Source source);

struct Config {
  // Job-wide
  int64_t fusion_bytes;
  int64_t block_bytes;
  int64_t staging_slots;
  int64_t cache_capacity;
  int64_t max_process_sets;
  int64_t bundles;
  std::string join_average;
  double stall_warn;   // seconds; 0: never
  double stall_abort;  // seconds; 0: never
  double init_timeout;
  double leave_timeout;
  double shutdown_timeout;
  double peer_timeout;
  std::string channel;  // between hosts: auto, tcp or mpi
  std::string wire;     // the same
  std::string flight_dir;
  std::string timeline;
  int64_t timeline_mark_cycles;
  int64_t check_numerics;
  int64_t metrics_port;  // 0: none
  std::string metrics_address;
  int64_t gpu_fusion_bytes;
  std::string gpu_plane;
  std::string shared_gpu;
  std::string gpu_order;
  std::string nccl_algo;
  // Of this rank
  int64_t spin_us;  // -1: decide from the cores at hand
  std::string priority;
  std::string cpu_target;
  std::string log_level;
  std::string log_format;
  int64_t log_rate;  // lines a second
  std::string death_watch;
  std::string cuda_library;
  std::string nccl_library;
  std::string nvrtc_library;
  std::string nvtx_library;
  std::string nvtx;      // not empty: a profiler listens
  int64_t stack_signal;  // -1: the first free real-time signal; 0: off
  // Read by the Python package
  std::string rendezvous;
  int64_t rank;
  int64_t size;

  std::vector<std::string> library_folders;  // of Python's packages, for GPU libraries
  std::string tuning;                        // the file that was read
  std::vector<Source> sources;               // by row of the table
};

struct Variable {
  const char* name;
  const char* alias;  // Horovod's name of the same meaning, or ""
  const char* fallback;
  const char* meaning;
  bool job_wide;
  std::variant<int64_t Config::*, double Config::*, std::string Config::*> field;

  // Throws Error(kInvalidArgument) naming the variable. Sizes take K, M and G.
  void set(Config& config, const std::string& text) const;
  std::string get(const Config& config) const;
};

std::span<const Variable> variables();

// Defaults, then the tuning file, then the environment.
Config read_config();

// Job-wide values as text, one per row of the table, for the agreement at init.
std::string job_wide_text(const Config& config);
// Rank 0's values.
void apply_job_wide_text(Config& config, const std::string& text);

}  // namespace farandole
