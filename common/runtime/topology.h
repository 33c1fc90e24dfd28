// Which ranks share a host.
#ifndef BAGUA_COMMON_RUNTIME_TOPOLOGY_H_
#define BAGUA_COMMON_RUNTIME_TOPOLOGY_H_

#include <vector>

namespace bagua {

struct Topology {
  int local_rank = 0;  // among the ranks of this host
  int local_size = 1;
  int cross_rank = 0;  // among the hosts that hold a rank of the same local rank
  int cross_size = 1;
  bool homogeneous = true;  // every host holds equally many ranks

  // `hosts`: number of each rank's host.
  static Topology Of(const std::vector<int>& hosts, int rank);
};

}  // namespace bagua

#endif  // BAGUA_COMMON_RUNTIME_TOPOLOGY_H_
