// The rank that decides, alone: submissions in, agreements out.
#include "common/runtime/coordinator.h"

#include <gtest/gtest.h>

#include <chrono>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "tests/cpp/operations.h"

namespace bagua {
namespace {

const Deadline kStart{std::chrono::hours(1)};
Deadline At(int seconds) {
  return kStart + std::chrono::seconds(seconds);
}

Request AllreduceOf(int64_t count, DType dtype = DType::kFloat32) {
  Request request;
  request.tensors.push_back(MetaOf(dtype, {count}));
  return request;
}

Submission InFull(const std::string& name, Request request, uint64_t sequence = 0) {
  Submission submission;
  submission.name = name;
  submission.sequence = sequence;
  submission.request = std::move(request);
  return submission;
}

Submission ById(uint32_t id, uint64_t sequence = 0) {
  Submission submission;
  submission.id = id;
  submission.sequence = sequence;
  return submission;
}

Config ConfigOf(size_t capacity, size_t fusion_bytes = 0) {
  Config config;
  config.cache_capacity = capacity;
  config.fusion_bytes = fusion_bytes;
  return config;
}

void Submit(Coordinator* coordinator, int rank, Submission submission, int second = 0,
            uint64_t heard = 0) {
  ExpectOk(coordinator->Receive(rank, std::move(submission), At(second), heard));
}

void SubmitOnAll(Coordinator* coordinator, int ranks, const Submission& submission) {
  for (int r = 0; r < ranks; ++r) Submit(coordinator, r, submission);
}

const Agreement& Only(const Response& response) {
  EXPECT_EQ(response.units.size(), 1u);
  EXPECT_EQ(response.units.at(0).agreements.size(), 1u);
  return response.units.at(0).agreements.at(0);
}

// Submits `name` in full on both ranks; the id by which it is known then.
uint32_t Learn(Coordinator* coordinator, const std::string& name) {
  SubmitOnAll(coordinator, 2, InFull(name, AllreduceOf(4)));
  const Response response = coordinator->TakeResponse();
  ExpectOk(Only(response).error);
  return Only(response).id;
}

TEST(Coordinator, AgreesOnceTheLastRankHasSubmitted) {
  Coordinator coordinator({0, 1, 2}, ConfigOf(8));
  for (const int rank : {2, 0}) {
    Submit(&coordinator, rank, InFull("w", AllreduceOf(4)));
    EXPECT_TRUE(coordinator.TakeResponse().empty());
    EXPECT_TRUE(coordinator.has_pending());
  }
  Submit(&coordinator, 1, InFull("w", AllreduceOf(4)));
  EXPECT_FALSE(coordinator.has_pending());
  const Response response = coordinator.TakeResponse();
  EXPECT_EQ(Only(response).name, "w");
  EXPECT_FALSE(Only(response).known);
  EXPECT_NE(Only(response).id, 0u);
  ExpectOk(Only(response).error);
  EXPECT_TRUE(coordinator.TakeResponse().empty());
}

TEST(Coordinator, OrdersOperationsAsTheyBecomeComplete) {
  Coordinator coordinator({0, 1}, ConfigOf(8));
  for (const char* name : {"a", "b", "c"}) Submit(&coordinator, 0, InFull(name, AllreduceOf(4)));
  for (const char* name : {"c", "a", "b"}) Submit(&coordinator, 1, InFull(name, AllreduceOf(4)));
  std::string order;
  for (const Unit& unit : coordinator.TakeResponse().units) order += unit.agreements[0].name;
  EXPECT_EQ(order, "cab");
}

TEST(Coordinator, AnswersIdsWithTheIdAlone) {
  Coordinator coordinator({0, 1}, ConfigOf(8));
  const uint32_t id = Learn(&coordinator, "w");
  SubmitOnAll(&coordinator, 2, ById(id));
  const Response response = coordinator.TakeResponse();
  EXPECT_TRUE(Only(response).known);
  EXPECT_EQ(Only(response).id, id);
  EXPECT_TRUE(Only(response).sizes.empty());
}

TEST(Coordinator, LearnsUnnamedOperationsByTheirSequence) {
  Coordinator coordinator({0, 1}, ConfigOf(8));
  SubmitOnAll(&coordinator, 2, InFull("", AllreduceOf(4), 1));
  const uint32_t id = Only(coordinator.TakeResponse()).id;
  Submit(&coordinator, 0, ById(id, 2));
  Submit(&coordinator, 0, ById(id, 3));
  Submit(&coordinator, 1, ById(id, 2));
  const Response response = coordinator.TakeResponse();
  EXPECT_EQ(Only(response).sequence, 2u);
  EXPECT_TRUE(Only(response).known);
  EXPECT_EQ(coordinator.Stalls(At(0)).size(), 1u);
}

TEST(Coordinator, CollectsTheRowsOfAllRanks) {
  Coordinator coordinator({0, 1, 2}, ConfigOf(8));
  for (int rank = 0; rank < 3; ++rank) {
    Request request;
    request.kind = Kind::kAllgather;
    request.tensors = {MetaOf(DType::kInt8, {rank + 1, 7}), MetaOf(DType::kInt8, {5 - rank})};
    Submit(&coordinator, rank, InFull("rows", request));
  }
  EXPECT_EQ(Only(coordinator.TakeResponse()).sizes, (Sizes{1, 2, 3, 5, 4, 3}));
  for (int rank = 0; rank < 3; ++rank) {
    Request request;
    request.kind = Kind::kAlltoall;
    request.tensors = {MetaOf(DType::kInt8, {6})};
    request.splits = {rank, 3 - rank, 3};
    Submit(&coordinator, rank, InFull("exchange", request));
  }
  EXPECT_EQ(Only(coordinator.TakeResponse()).sizes, (Sizes{0, 3, 3, 1, 2, 3, 2, 1, 3}));
}

TEST(Coordinator, NamesTheRankAndBothValuesOfAMismatch) {
  Coordinator coordinator({4, 6, 9}, ConfigOf(8));
  Submit(&coordinator, 0, InFull("layer3.bias", AllreduceOf(128)));
  Submit(&coordinator, 1, InFull("layer3.bias", AllreduceOf(128)));
  Submit(&coordinator, 2, InFull("layer3.bias", AllreduceOf(64)));
  const Response response = coordinator.TakeResponse();
  EXPECT_EQ(Only(response).error.code(), StatusCode::kMismatch);
  EXPECT_EQ(Only(response).error.message(),
            "allreduce 'layer3.bias': rank 9 sent float32[64], rank 4 sent float32[128]. "
            "All ranks must build the same model.");
  EXPECT_EQ(Only(response).id, 0u);
}

TEST(Coordinator, ComparesAKnownRequestWithOneInFull) {
  Coordinator coordinator({0, 1}, ConfigOf(8));
  const uint32_t id = Learn(&coordinator, "w");
  Submit(&coordinator, 0, ById(id));
  Submit(&coordinator, 1, InFull("w", AllreduceOf(5)));
  ExpectFails(Only(coordinator.TakeResponse()).error, StatusCode::kMismatch,
              {"rank 1 sent float32[5]", "rank 0 sent float32[4]"});
  // The id stands for what it stood for.
  SubmitOnAll(&coordinator, 2, ById(id));
  EXPECT_TRUE(Only(coordinator.TakeResponse()).known);
}

TEST(Coordinator, ForgetsTheOldMeaningOfAName) {
  Coordinator coordinator({0, 1}, ConfigOf(8));
  const uint32_t id = Learn(&coordinator, "w");
  SubmitOnAll(&coordinator, 2, InFull("w", AllreduceOf(5)));
  const Response response = coordinator.TakeResponse();
  EXPECT_EQ(response.forgotten, std::vector<uint32_t>{id});
  EXPECT_GT(Only(response).id, id);
}

TEST(Coordinator, ForgetsTheOldMeaningWhenAllButOneStillUseIt) {
  Coordinator coordinator({0, 1, 2}, ConfigOf(8));
  const auto gather = [](int64_t rows) {
    Request request;
    request.kind = Kind::kAllgather;
    request.tensors = {MetaOf(DType::kInt8, {rows})};
    return InFull("rows", request);
  };
  SubmitOnAll(&coordinator, 3, gather(2));
  const uint32_t old = Only(coordinator.TakeResponse()).id;
  Submit(&coordinator, 0, ById(old));
  Submit(&coordinator, 1, ById(old));
  Submit(&coordinator, 2, gather(7));
  const Response response = coordinator.TakeResponse();
  EXPECT_EQ(Only(response).sizes, (Sizes{2, 2, 7}));
  EXPECT_EQ(response.forgotten, std::vector<uint32_t>{old});
  ASSERT_NE(Only(response).id, 0u);
  SubmitOnAll(&coordinator, 3, ById(Only(response).id));
  EXPECT_TRUE(Only(coordinator.TakeResponse()).known);
}

TEST(Coordinator, ForgetsTheLeastRecentlyUsed) {
  Coordinator coordinator({0, 1}, ConfigOf(2));
  const uint32_t a = Learn(&coordinator, "a");
  const uint32_t b = Learn(&coordinator, "b");
  SubmitOnAll(&coordinator, 2, ById(a));
  EXPECT_TRUE(coordinator.TakeResponse().forgotten.empty());
  SubmitOnAll(&coordinator, 2, InFull("c", AllreduceOf(4)));
  EXPECT_EQ(coordinator.TakeResponse().forgotten, std::vector<uint32_t>{b});
  SubmitOnAll(&coordinator, 2, ById(a));
  EXPECT_TRUE(Only(coordinator.TakeResponse()).known);
}

TEST(Coordinator, KeepsWhatIsAwaitedRatherThanLearn) {
  Coordinator coordinator({0, 1}, ConfigOf(1));
  const uint32_t a = Learn(&coordinator, "a");
  Submit(&coordinator, 0, ById(a));
  SubmitOnAll(&coordinator, 2, InFull("b", AllreduceOf(4)));
  const Response response = coordinator.TakeResponse();
  EXPECT_TRUE(response.forgotten.empty());
  EXPECT_EQ(Only(response).id, 0u);
  Submit(&coordinator, 1, ById(a));
  EXPECT_TRUE(Only(coordinator.TakeResponse()).known);
}

TEST(Coordinator, DropsAForgottenIdUntilTheRankSubmitsInFull) {
  Coordinator coordinator({0, 1}, ConfigOf(1));
  const uint32_t a = Learn(&coordinator, "a");
  Learn(&coordinator, "b");
  Submit(&coordinator, 1, ById(a));
  EXPECT_FALSE(coordinator.has_pending());
  Submit(&coordinator, 1, InFull("a", AllreduceOf(4)));
  Submit(&coordinator, 0, InFull("a", AllreduceOf(4)));
  ExpectOk(Only(coordinator.TakeResponse()).error);
}

TEST(Coordinator, LearnsNothingWithoutCapacity) {
  Coordinator coordinator({0, 1}, ConfigOf(0));
  EXPECT_EQ(Learn(&coordinator, "a"), 0u);
  EXPECT_EQ(Learn(&coordinator, "a"), 0u);
}

TEST(Coordinator, RefusesASecondSubmissionOfARank) {
  Coordinator coordinator({0, 1}, ConfigOf(8));
  Submit(&coordinator, 1, InFull("w", AllreduceOf(4)));
  ExpectFails(coordinator.Receive(1, InFull("w", AllreduceOf(4)), At(0), 0), StatusCode::kInternal,
              {"rank 1", "'w'", "twice"});
}

TEST(Coordinator, RefusesAnIdUnderTheNumberOfAnotherKindOfOperation) {
  Coordinator coordinator({0, 1}, ConfigOf(8));
  const uint32_t id = Learn(&coordinator, "w");
  ExpectFails(coordinator.Receive(1, ById(id, 3), At(0), 0), StatusCode::kInternal,
              {"rank 1", StrCat("id ", id)});
}

TEST(Coordinator, RefusesSplitsThatDoNotCutTheRows) {
  Request request;
  request.kind = Kind::kAlltoall;
  request.tensors = {MetaOf(DType::kInt32, {5, 2})};
  const int64_t most = std::numeric_limits<int64_t>::max();
  for (const std::vector<int64_t>& splits : std::vector<std::vector<int64_t>>{
           {}, {5}, {2, 2}, {2, 4}, {-1, 6}, {most, most}, {2, 3, 0}}) {
    Coordinator coordinator({0, 1}, ConfigOf(8));
    request.splits = splits;
    ExpectFails(coordinator.Receive(1, InFull("a", request), At(0), 0), StatusCode::kInternal,
                {"rank 1", "splits"});
  }
  Coordinator coordinator({0, 1}, ConfigOf(8));
  request.splits = {5, 0};
  SubmitOnAll(&coordinator, 2, InFull("a", request));
  EXPECT_EQ(Only(coordinator.TakeResponse()).sizes, (Sizes{5, 0, 5, 0}));
}

TEST(Coordinator, FailsWhatWaitsForALeaverAndWhatComesLater) {
  Coordinator coordinator({0, 1, 2}, ConfigOf(8));
  const Status reason(StatusCode::kPeerLost, "rank 2 left");
  for (const int rank : {0, 1}) Submit(&coordinator, rank, InFull("waits", AllreduceOf(4)));
  // All but rank 1; the leaver has submitted it, so it completes or not by rank 1.
  for (const int rank : {0, 2}) Submit(&coordinator, rank, InFull("submitted", AllreduceOf(4)));
  coordinator.Leave(2, reason);
  const Response response = coordinator.TakeResponse();
  EXPECT_EQ(Only(response).name, "waits");
  ExpectFails(Only(response).error, StatusCode::kPeerLost, {"allreduce 'waits'", "rank 2 left"});
  Submit(&coordinator, 0, InFull("later", AllreduceOf(4)));
  ExpectFails(Only(coordinator.TakeResponse()).error, StatusCode::kPeerLost,
              {"allreduce 'later'", "rank 2 left"});
}

TEST(Coordinator, TellsWhatWaitsSinceWhenAndForWhom) {
  Coordinator coordinator({5, 6, 7}, ConfigOf(8));
  Submit(&coordinator, 1, InFull("early", AllreduceOf(4)), 10);
  Submit(&coordinator, 0, InFull("late", AllreduceOf(4)), 20);
  Submit(&coordinator, 2, InFull("late", AllreduceOf(4)), 30);
  EXPECT_TRUE(coordinator.Stalls(At(9)).empty());
  std::vector<Stall> stalls = coordinator.Stalls(At(10));
  ASSERT_EQ(stalls.size(), 1u);
  EXPECT_EQ(stalls[0].what, "allreduce 'early'");
  EXPECT_EQ(stalls[0].missing, (std::vector<int>{5, 7}));
  EXPECT_EQ(stalls[0].since, At(10));
  stalls = coordinator.Stalls(At(25));
  ASSERT_EQ(stalls.size(), 2u);
  const Stall& late = stalls[stalls[0].what == "allreduce 'late'" ? 0 : 1];
  EXPECT_EQ(late.missing, std::vector<int>{6});
  EXPECT_EQ(late.since, At(20));
}

TEST(Coordinator, TimesOutWhatWaitedTooLong) {
  Coordinator coordinator({0, 3, 7}, ConfigOf(8));
  Submit(&coordinator, 0, InFull("fc.weight", AllreduceOf(4)), 10);
  Submit(&coordinator, 0, InFull("young", AllreduceOf(4)), 20);
  coordinator.TimeOut(At(9), 600);
  EXPECT_TRUE(coordinator.TakeResponse().empty());
  coordinator.TimeOut(At(15), 600);
  const Response response = coordinator.TakeResponse();
  EXPECT_EQ(Only(response).error.code(), StatusCode::kTimeout);
  EXPECT_EQ(Only(response).error.message(),
            "allreduce 'fc.weight': waited 600 s for ranks 3, 7 (never submitted it). "
            "Set BAGUA_TIMEOUT_SECONDS to wait longer.");
  EXPECT_TRUE(coordinator.has_pending());
}

TEST(Coordinator, LeavesOutWhatARankSubmittedBeforeItHeardOfTheTimeout) {
  for (const bool by_id : {false, true}) {
    Coordinator coordinator({0, 1}, ConfigOf(8));
    const uint32_t id = Learn(&coordinator, "w");
    const Submission again = by_id ? ById(id) : InFull("w", AllreduceOf(4));
    Submit(&coordinator, 0, again, 10, 1);
    coordinator.TimeOut(At(15), 600);
    // On its way when the response was not.
    Submit(&coordinator, 1, again, 15, 1);
    EXPECT_EQ(Only(coordinator.TakeResponse()).error.code(), StatusCode::kTimeout);
    Submit(&coordinator, 1, again, 16, 1);
    EXPECT_FALSE(coordinator.has_pending());
    // Both have heard: it counts anew.
    Submit(&coordinator, 1, again, 20, 2);
    Submit(&coordinator, 0, again, 20, 2);
    ExpectOk(Only(coordinator.TakeResponse()).error);
    EXPECT_FALSE(coordinator.has_pending());
  }
}

// ---- Fusion -------------------------------------------------------------------------------------

std::vector<std::string> Units(const Response& response) {
  std::vector<std::string> units;
  for (const Unit& unit : response.units) {
    units.emplace_back();
    for (const Agreement& agreement : unit.agreements) units.back() += agreement.name;
  }
  return units;
}

TEST(CoordinatorFusion, FillsUnitsUpToTheLimit) {
  Coordinator coordinator({0}, ConfigOf(8, 100));
  // 40 bytes each: two fit.
  for (const char* name : {"a", "b", "c", "d", "e"})
    Submit(&coordinator, 0, InFull(name, AllreduceOf(10)));
  EXPECT_EQ(Units(coordinator.TakeResponse()), (std::vector<std::string>{"ab", "cd", "e"}));
}

TEST(CoordinatorFusion, TakesExactlyTheLimitAndNotMore) {
  Coordinator coordinator({0}, ConfigOf(8, 80));
  for (const char* name : {"a", "b", "c"}) Submit(&coordinator, 0, InFull(name, AllreduceOf(10)));
  EXPECT_EQ(Units(coordinator.TakeResponse()), (std::vector<std::string>{"ab", "c"}));
}

TEST(CoordinatorFusion, ALargeOneTravelsAloneAndSmallOnesPassIt) {
  Coordinator coordinator({0}, ConfigOf(8, 100));
  Submit(&coordinator, 0, InFull("a", AllreduceOf(10)));
  Submit(&coordinator, 0, InFull("L", AllreduceOf(1000)));
  Submit(&coordinator, 0, InFull("b", AllreduceOf(10)));
  EXPECT_EQ(Units(coordinator.TakeResponse()), (std::vector<std::string>{"ab", "L"}));
}

TEST(CoordinatorFusion, KeepsApartWhatIsReducedDifferently) {
  Coordinator coordinator({0}, ConfigOf(16, 1000));
  const auto with = [](auto change) {
    Request request = AllreduceOf(4);
    change(&request);
    return request;
  };
  std::vector<Request> requests = {
      AllreduceOf(4),
      AllreduceOf(4, DType::kFloat64),
      with([](Request* r) { r->op = ReduceOp::kMax; }),
      with([](Request* r) { r->prescale = 2; }),
      with([](Request* r) { r->postscale = 2; }),
      with([](Request* r) { r->kind = Kind::kBroadcast; }),
      with([](Request* r) { r->tensors.push_back(MetaOf(DType::kInt8, {3})); }),
  };
  for (size_t i = 0; i < requests.size(); ++i)
    Submit(&coordinator, 0, InFull(StrCat(i), requests[i]));
  EXPECT_EQ(coordinator.TakeResponse().units.size(), requests.size());
}

TEST(CoordinatorFusion, ReachesNotAcrossResponses) {
  Coordinator coordinator({0}, ConfigOf(8, 1000));
  Submit(&coordinator, 0, InFull("a", AllreduceOf(4)));
  EXPECT_EQ(Units(coordinator.TakeResponse()), std::vector<std::string>{"a"});
  Submit(&coordinator, 0, InFull("b", AllreduceOf(4)));
  EXPECT_EQ(Units(coordinator.TakeResponse()), std::vector<std::string>{"b"});
}

// ---- What travels -------------------------------------------------------------------------------

TEST(CoordinatorMessages, ComeOutAsTheyWentIn) {
  Request request;
  request.kind = Kind::kAlltoall;
  request.group = 3;
  request.op = ReduceOp::kMax;
  request.root = 2;
  request.prescale = 0.25;
  request.postscale = -3;
  request.tensors = {MetaOf(DType::kBfloat16, {2, 0, 5}), MetaOf(DType::kBool, {})};
  request.splits = {2, 0, 7};
  request.details = {"op=Average", ""};
  for (const Submission& submission :
       {InFull("name", request), InFull("", request, 17), ById(9), ById(9, 18)}) {
    Writer writer;
    Encode(submission, &writer);
    const Bytes bytes = writer.Take();
    Reader reader(bytes);
    Result<Submission> decoded = DecodeSubmission(&reader);
    ASSERT_TRUE(decoded.ok());
    EXPECT_EQ(decoded.value().id, submission.id);
    EXPECT_EQ(decoded.value().sequence, submission.sequence);
    EXPECT_EQ(decoded.value().name, submission.name);
    EXPECT_TRUE(decoded.value().request == submission.request);
  }
  Response response;
  response.forgotten = {4, 9};
  response.units.resize(3);
  response.units[0].agreements = {{7, true, 0, "", {}, {}}, {8, false, 0, "n", {1, 2}, {}}};
  response.units[1].agreements = {{0, false, 5, "", {}, Status(StatusCode::kMismatch, "why")}};
  const Bytes bytes = Encode(response);
  Reader reader(bytes);
  Result<Response> decoded = DecodeResponse(&reader);
  ASSERT_TRUE(decoded.ok());
  EXPECT_EQ(decoded.value().forgotten, response.forgotten);
  ASSERT_EQ(decoded.value().units.size(), 3u);
  EXPECT_EQ(decoded.value().units[0].agreements[0].id, 7u);
  EXPECT_TRUE(decoded.value().units[0].agreements[0].known);
  EXPECT_EQ(decoded.value().units[0].agreements[1].name, "n");
  EXPECT_EQ(decoded.value().units[0].agreements[1].sizes, (Sizes{1, 2}));
  ExpectFails(decoded.value().units[1].agreements[0].error, StatusCode::kMismatch, {"why"});
  EXPECT_EQ(decoded.value().units[1].agreements[0].sequence, 5u);
}

TEST(CoordinatorMessages, CutAnywhereAreRefused) {
  Writer writer;
  Request request = AllreduceOf(4);
  request.splits = {1, 2};
  request.details = {"detail"};
  Encode(InFull("name", request), &writer);
  const Bytes submission = writer.Take();
  for (size_t length = 0; length < submission.size(); ++length) {
    const Bytes cut(submission.begin(), submission.begin() + length);
    Reader reader(cut);
    EXPECT_FALSE(DecodeSubmission(&reader).ok()) << length;
  }
  Response response;
  response.forgotten = {4};
  response.units.resize(1);
  response.units[0].agreements = {{8, false, 0, "n", {1, 2}, {}},
                                  {0, false, 5, "", {}, Status(StatusCode::kTimeout, "why")}};
  const Bytes whole = Encode(response);
  for (size_t length = 0; length < whole.size(); ++length) {
    const Bytes cut(whole.begin(), whole.begin() + length);
    Reader reader(cut);
    EXPECT_FALSE(DecodeResponse(&reader).ok()) << length;
  }
}

}  // namespace
}  // namespace bagua
