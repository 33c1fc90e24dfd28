#include "common/runtime/topology.h"

#include <cstddef>
#include <map>

namespace bagua {

Topology Topology::Of(const std::vector<int>& hosts, int rank) {
  Topology topology;
  std::map<int, int> ranks_seen;  // by host
  std::vector<int> local_ranks;
  for (const int host : hosts) local_ranks.push_back(ranks_seen[host]++);
  topology.local_rank = local_ranks[rank];
  topology.local_size = ranks_seen[hosts[rank]];
  topology.cross_size = 0;
  for (std::size_t r = 0; r < hosts.size(); ++r) {
    if (local_ranks[r] != topology.local_rank) continue;
    if (static_cast<int>(r) == rank) topology.cross_rank = topology.cross_size;
    ++topology.cross_size;
  }
  for (const auto& [host, ranks] : ranks_seen)
    topology.homogeneous = topology.homogeneous && ranks == topology.local_size;
  return topology;
}

}  // namespace bagua
