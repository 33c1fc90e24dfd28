// The rank that decides, while some ranks have joined.
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "common/runtime/coordinator.h"
#include "common/runtime/plan_table.h"
#include "tests/cpp/operations.h"

namespace bagua {
namespace {

const Deadline kStart{std::chrono::hours(1)};
Deadline At(int seconds) {
  return kStart + std::chrono::seconds(seconds);
}

Request AllreduceOf(int64_t count, ReduceOp op = ReduceOp::kSum) {
  Request request;
  request.op = op;
  request.tensors.push_back(MetaOf(DType::kFloat32, {count}));
  return request;
}

class CoordinatorJoinTest : public testing::Test {
 protected:
  CoordinatorJoinTest() : CoordinatorJoinTest(8) {}
  explicit CoordinatorJoinTest(size_t capacity) : coordinator_({4, 6, 9}, ConfigOf(capacity)) {}

  static Config ConfigOf(size_t capacity) {
    Config config;
    config.cache_capacity = capacity;
    config.fusion_bytes = 0;
    return config;
  }
  // `rank` is the place among ranks 4, 6 and 9.
  void Submit(int rank, const std::string& name, Request request, uint64_t sequence = 0,
              uint64_t heard = 0) {
    Submission submission;
    submission.name = name;
    submission.sequence = sequence;
    submission.request = std::move(request);
    ExpectOk(coordinator_.Receive(rank, std::move(submission), At(0), heard));
  }
  void SubmitId(int rank, uint32_t id, uint64_t heard = 0) {
    Submission submission;
    submission.id = id;
    ExpectOk(coordinator_.Receive(rank, std::move(submission), At(0), heard));
  }
  void Join(int rank, uint64_t heard = 0) {
    Request request;
    request.kind = Kind::kJoin;
    Submit(rank, kJoinName, std::move(request), 0, heard);
  }
  // Submits on all ranks; the id by which it is known then.
  uint32_t Learn(const std::string& name) {
    for (int r = 0; r < 3; ++r) Submit(r, name, AllreduceOf(4));
    return Take().at(0).id;
  }
  std::vector<Agreement> Take() {
    response_ = coordinator_.TakeResponse();
    std::vector<Agreement> agreements;
    for (const Unit& unit : response_.units)
      agreements.insert(agreements.end(), unit.agreements.begin(), unit.agreements.end());
    return agreements;
  }

  Coordinator coordinator_;
  Response response_;  // of the last Take
};

TEST_F(CoordinatorJoinTest, TellsWhoJoinedAndDescribesWhatTheySubmittedNot) {
  Join(1);
  EXPECT_TRUE(Take().empty());
  EXPECT_EQ(response_.joined, (std::vector<int32_t>{6}));
  Submit(2, "w", AllreduceOf(4));
  EXPECT_TRUE(coordinator_.TakeResponse().empty());
  Submit(0, "w", AllreduceOf(4));
  const std::vector<Agreement> agreements = Take();
  ASSERT_EQ(agreements.size(), 1u);
  ExpectOk(agreements[0].error);
  ASSERT_TRUE(agreements[0].served.has_value());
  EXPECT_EQ(*agreements[0].served, AllreduceOf(4));
  // Not all ranks have described it: no rank remembers it.
  EXPECT_EQ(agreements[0].id, 0u);
  EXPECT_TRUE(response_.joined.empty());
}

TEST_F(CoordinatorJoinTest, NamesWhatAllRanksKnowByItsId) {
  const uint32_t id = Learn("w");
  Join(0);
  SubmitId(1, id);
  SubmitId(2, id);
  const std::vector<Agreement> agreements = Take();
  ASSERT_EQ(agreements.size(), 1u);
  EXPECT_EQ(agreements[0].id, id);
  EXPECT_TRUE(agreements[0].known);
  EXPECT_FALSE(agreements[0].served.has_value());
}

TEST_F(CoordinatorJoinTest, EndsBehindEverythingElseWithTheLastRank) {
  Submit(0, "half", AllreduceOf(4));
  Submit(1, "", AllreduceOf(5), 7);
  Join(2);
  Join(0);
  // Rank 6 has yet to submit "half" or to join.
  std::vector<Agreement> agreements = Take();
  ASSERT_EQ(agreements.size(), 1u);
  EXPECT_EQ(agreements[0].sequence, 7u);
  Join(1);
  agreements = Take();
  ASSERT_EQ(agreements.size(), 2u);
  EXPECT_EQ(agreements[0].name, "half");
  ExpectOk(agreements[0].error);
  EXPECT_EQ(agreements[1].name, kJoinName);
  EXPECT_EQ(agreements[1].sizes, (Sizes{6}));
  // Nobody has joined any more.
  Submit(0, "w", AllreduceOf(4));
  EXPECT_TRUE(coordinator_.TakeResponse().empty());
}

TEST_F(CoordinatorJoinTest, RefusesWhatZerosCannotServe) {
  Submit(1, "early", AllreduceOf(4, ReduceOp::kMax));
  Join(2);
  Join(0);
  std::vector<Agreement> agreements = Take();
  ASSERT_EQ(agreements.size(), 1u);
  ExpectFails(agreements[0].error, StatusCode::kMismatch,
              {"allreduce 'early'", "ranks 4, 9 have joined", "Sum or Average"});
  Request barrier;
  barrier.kind = Kind::kBarrier;
  Submit(1, "", std::move(barrier), 1);
  agreements = Take();
  ASSERT_EQ(agreements.size(), 1u);
  ExpectFails(agreements[0].error, StatusCode::kMismatch, {"barrier (unnamed, number 1)"});
}

TEST_F(CoordinatorJoinTest, RefusesJoinsThatNoHonestRankSends) {
  Submission submission;
  submission.name = "w";
  submission.request.kind = Kind::kJoin;
  ExpectFails(coordinator_.Receive(1, submission, At(0), 0), StatusCode::kInternal,
              {"rank 6", "'w'"});
  Join(1);
  submission.name = kJoinName;
  ExpectFails(coordinator_.Receive(1, submission, At(0), 0), StatusCode::kInternal,
              {"rank 6", "twice at once"});
}

TEST_F(CoordinatorJoinTest, FailsWhenARankLeavesAndIsOverThen) {
  Join(0);
  coordinator_.Leave(1, Status(StatusCode::kPeerLost, "rank 6 left the job"));
  std::vector<Agreement> agreements = Take();
  ASSERT_EQ(agreements.size(), 1u);
  ExpectFails(agreements[0].error, StatusCode::kPeerLost, {"join", "rank 6 left"});
  Join(2);
  agreements = Take();
  ASSERT_EQ(agreements.size(), 1u);
  ExpectFails(agreements[0].error, StatusCode::kPeerLost, {"join", "rank 6 left"});
}

TEST_F(CoordinatorJoinTest, TimesOutOnlyWhenWorkCeased) {
  Join(0);
  Take();
  coordinator_.NoteProgress(At(50));
  coordinator_.TimeOut(At(40), 10);
  EXPECT_TRUE(Take().empty());
  EXPECT_EQ(coordinator_.Stalls(At(40)).size(), 0u);
  EXPECT_EQ(coordinator_.Stalls(At(60)).size(), 1u);
  coordinator_.TimeOut(At(60), 10);
  const std::vector<Agreement> agreements = Take();
  ASSERT_EQ(agreements.size(), 1u);
  ExpectFails(agreements[0].error, StatusCode::kTimeout, {"join", "ranks 6, 9"});
  // Rank 4 has not joined any more.
  Submit(1, "w", AllreduceOf(4));
  Submit(2, "w", AllreduceOf(4));
  EXPECT_TRUE(coordinator_.TakeResponse().empty());
  coordinator_.NoteProgress(At(70));
}

class TinyCoordinatorJoinTest : public CoordinatorJoinTest {
 protected:
  TinyCoordinatorJoinTest() : CoordinatorJoinTest(1) {}
};

TEST_F(TinyCoordinatorJoinTest, DropsWhatAJoinedRankRepeatsThoughItWasServed) {
  const uint32_t old = Learn("w");
  Learn("other");  // the cache holds one: "w" is forgotten
  // Rank 9 has not heard of that.
  SubmitId(2, old, 1);
  Join(2, 1);
  Submit(0, "w", AllreduceOf(4), 0, 2);
  Submit(1, "w", AllreduceOf(4), 0, 2);
  EXPECT_EQ(Take().at(0).name, "w");
  // It hears that the id is out of use, before that "w" was served.
  Submit(2, "w", AllreduceOf(4), 0, 2);
  EXPECT_EQ(coordinator_.Stalls(At(9)).size(), 1u);  // the join alone
  Submit(0, "w", AllreduceOf(4), 0, 3);
  EXPECT_TRUE(coordinator_.TakeResponse().empty());
  Submit(1, "w", AllreduceOf(4), 0, 3);
  EXPECT_TRUE(Take().at(0).served.has_value());
}

// ---- Messages -----------------------------------------------------------------------------------

Response ServingResponse() {
  Response response;
  response.units.resize(1);
  Agreement agreement;
  agreement.name = "w";
  agreement.served = AllreduceOf(4);
  response.units[0].agreements = {agreement};
  response.joined = {6, 9};
  return response;
}

TEST(JoinMessages, ComeBackAsTheyWere) {
  const Bytes bytes = Encode(ServingResponse());
  Reader reader(bytes);
  Result<Response> decoded = DecodeResponse(&reader);
  ExpectOk(decoded.status());
  const Agreement& agreement = decoded.value().units.at(0).agreements.at(0);
  EXPECT_EQ(agreement.name, "w");
  EXPECT_EQ(agreement.served, AllreduceOf(4));
  EXPECT_EQ(decoded.value().joined, (std::vector<int32_t>{6, 9}));

  Writer writer;
  Encode(PlanNotice{PlanNotice::Kind::kDropped, 17, uint64_t{1} << 40}, &writer);
  const Bytes notice = writer.Take();
  Reader notice_reader(notice);
  EXPECT_EQ(Negotiator::GroupOf(&notice_reader), PlanTable::kMessages);
  Result<PlanNotice> back = DecodePlanNotice(&notice_reader);
  ExpectOk(back.status());
  EXPECT_EQ(back.value().kind, PlanNotice::Kind::kDropped);
  EXPECT_EQ(back.value().number, 17u);
  EXPECT_EQ(back.value().step, uint64_t{1} << 40);
}

TEST(JoinMessages, CutAnywhereAreRefused) {
  const Bytes whole = Encode(ServingResponse());
  for (size_t bytes = 0; bytes < whole.size(); ++bytes) {
    const Bytes cut(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(bytes));
    Reader reader(cut);
    EXPECT_FALSE(DecodeResponse(&reader).ok()) << bytes;
  }
  Writer writer;
  Encode(PlanNotice{}, &writer);
  const Bytes notice = writer.Take();
  for (size_t bytes = 4; bytes < notice.size(); ++bytes) {
    const Bytes cut(notice.begin() + 4, notice.begin() + static_cast<std::ptrdiff_t>(bytes));
    Reader reader(cut);
    EXPECT_FALSE(DecodePlanNotice(&reader).ok()) << bytes;
  }
}

}  // namespace
}  // namespace bagua
