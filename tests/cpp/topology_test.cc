#include "common/runtime/topology.h"

#include <gtest/gtest.h>

#include <vector>

namespace bagua {
namespace {

void ExpectPlace(const std::vector<int>& hosts, int rank, int local_rank, int local_size,
                 int cross_rank, int cross_size, bool homogeneous) {
  const Topology topology = Topology::Of(hosts, rank);
  EXPECT_EQ(topology.local_rank, local_rank) << "rank " << rank;
  EXPECT_EQ(topology.local_size, local_size) << "rank " << rank;
  EXPECT_EQ(topology.cross_rank, cross_rank) << "rank " << rank;
  EXPECT_EQ(topology.cross_size, cross_size) << "rank " << rank;
  EXPECT_EQ(topology.homogeneous, homogeneous) << "rank " << rank;
}

TEST(Topology, OfOneRankIsThatRank) {
  ExpectPlace({0}, 0, 0, 1, 0, 1, true);
}

TEST(Topology, OfOneHostNumbersItsRanks) {
  for (int rank = 0; rank < 3; ++rank) ExpectPlace({0, 0, 0}, rank, rank, 3, 0, 1, true);
}

TEST(Topology, OfOneRankPerHostNumbersTheHosts) {
  for (int rank = 0; rank < 3; ++rank) ExpectPlace({0, 1, 2}, rank, 0, 1, rank, 3, true);
}

TEST(Topology, DoesNotDependOnWhetherRanksOfAHostFollowEachOther) {
  ExpectPlace({0, 0, 1, 1}, 2, 0, 2, 1, 2, true);
  ExpectPlace({0, 1, 0, 1}, 2, 1, 2, 0, 2, true);
  ExpectPlace({0, 1, 1, 0}, 3, 1, 2, 1, 2, true);
  ExpectPlace({0, 1, 1, 0}, 2, 1, 2, 0, 2, true);
}

TEST(Topology, CountsOnlyHostsThatHoldTheLocalRank) {
  // Host 0 has three ranks, host 1 one, host 2 two.
  const std::vector<int> hosts = {0, 0, 0, 1, 2, 2};
  ExpectPlace(hosts, 0, 0, 3, 0, 3, false);
  ExpectPlace(hosts, 3, 0, 1, 1, 3, false);
  ExpectPlace(hosts, 4, 0, 2, 2, 3, false);
  ExpectPlace(hosts, 1, 1, 3, 0, 2, false);
  ExpectPlace(hosts, 5, 1, 2, 1, 2, false);
  ExpectPlace(hosts, 2, 2, 3, 0, 1, false);
}

}  // namespace
}  // namespace bagua
