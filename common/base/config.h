// Every knob of the core: variable, meaning, unit, default, cost of both extremes. The one place in
// C++ that reads the environment is Config::FromEnvironment.
#ifndef BAGUA_COMMON_BASE_CONFIG_H_
#define BAGUA_COMMON_BASE_CONFIG_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "common/base/status.h"

namespace bagua {

struct Config {
  // BAGUA_FUSION_BYTES. Largest fused buffer of negotiated operations. Default 64 MiB; 0 turns
  // fusion off. Smaller: more messages; larger: less overlap.
  size_t fusion_bytes = size_t{64} << 20;
  // BAGUA_BUCKET_BYTES. Size at which a plan's bucket closes. Default 10 MiB. Smaller: more
  // messages; larger: less overlap with backward.
  size_t bucket_bytes = size_t{10} << 20;
  // BAGUA_CACHE_CAPACITY. Operations whose description the ranks remember, so that a repeat sends
  // an id. Default 16384; 0 turns it off. Smaller: repeats send names again; larger: memory.
  size_t cache_capacity = 16384;
  // BAGUA_STALL_WARNING_SECONDS. Warns of operations that some ranks submitted and others did not.
  // Default 60; 0 never warns.
  double stall_warning_seconds = 60;
  // BAGUA_TIMEOUT_SECONDS. Fails operations that did not end in time; a quarter later, 5 s at most,
  // if it is the rank that would say so that does not answer. Default 600; 0 waits for ever.
  double timeout_seconds = 600;
  // BAGUA_START_TIMEOUT_SECONDS. How long init waits for the other ranks. Default 120.
  double start_timeout_seconds = 120;
  // BAGUA_SPIN_MICROSECONDS. How long a waiting thread looks before it sleeps, less where that was
  // in vain; after 5 us it lets others have the core between looks. Taken as 0 when a host has more
  // ranks than cores. Default 500. Smaller: a wake-up for each small message; larger: cores that
  // only look.
  double spin_microseconds = 500;
  // BAGUA_TRANSPORT. "auto": shared memory inside a host, TCP between hosts. "tcp": TCP everywhere.
  std::string transport = "auto";
  // BAGUA_SHM_SLOT_BYTES. Largest message that goes through the one-round mailbox of a host.
  // Default 16 KiB. Larger: memory (two slots a rank) and more bytes read by every rank.
  size_t shm_slot_bytes = size_t{16} << 10;
  // BAGUA_SHM_STAGING_BYTES. Shared staging memory of a rank for tensors outside of plans. Default
  // 4 MiB. Smaller: more synchronisation; larger: falls out of the cache.
  size_t shm_staging_bytes = size_t{4} << 20;
  // BAGUA_LOG_LEVEL. "debug", "info", "warning" (default), "error".
  std::string log_level = "warning";

  // kInvalidArgument naming the variable and its value if one cannot be read.
  static Result<Config> FromEnvironment();
};

}  // namespace bagua

#endif  // BAGUA_COMMON_BASE_CONFIG_H_
