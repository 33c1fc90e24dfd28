// What one rank can see to be wrong it says at once, and nobody else hears of it.
#include "common/runtime/validate.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "common/runtime/engine.h"
#include "tests/cpp/cluster.h"
#include "tests/cpp/operations.h"

namespace bagua {
namespace {

struct Refusal {
  Kind kind;
  std::function<void(Operation* operation)> spoil;
  std::vector<std::string> parts;
};

TEST(Arguments, ThatThisRankSeesToBeWrongAreRefusedAndNothingIsQueued) {
  const std::vector<Refusal> refusals = {
      {Kind::kAllreduce, [](Operation* o) { o->request.tensors.clear(); }, {"got 0 tensors"}},
      {Kind::kBarrier, [](Operation* o) { o->request.tensors.push_back({}); }, {"got 1 tensors"}},
      {Kind::kBroadcast,
       [](Operation* o) { o->request.tensors.push_back(o->request.tensors[0]); },
       {"one tensor, got 2"}},
      {Kind::kAllreduce, [](Operation* o) { o->request.tensors[0].device = 3; }, {"GPU 3"}},
      {Kind::kReduceScatter,
       [](Operation* o) { o->request.tensors[0] = MetaOf(DType::kFloat32, {}); },
       {"got a scalar"}},
      {Kind::kAllreduce, [](Operation* o) { o->request.op = ReduceOp::kAdasum; }, {"Adasum"}},
      {Kind::kAllreduce, [](Operation* o) { o->request.prescale = NAN; }, {"nan", "finite"}},
      {Kind::kReduceScatter,
       [](Operation* o) { o->request.postscale = INFINITY; },
       {"inf", "finite"}},
      {Kind::kAllreduce,
       [](Operation* o) {
         o->request.op = ReduceOp::kAverage;
         o->request.tensors[0].dtype = DType::kBool;
       },
       {"bool"}},
      {Kind::kBroadcast, [](Operation* o) { o->request.root = 3; }, {"root_rank 3", "0 to 2"}},
      {Kind::kBroadcast, [](Operation* o) { o->request.root = -1; }, {"root_rank -1"}},
      {Kind::kAlltoall,
       [](Operation* o) {
         o->request.splits = {1, 2};
       },
       {"2 entries for 3 ranks"}},
      {Kind::kAlltoall,
       [](Operation* o) {
         o->request.splits = {-1, 2, 2};
       },
       {"negative"}},
      {Kind::kAlltoall,
       [](Operation* o) {
         o->request.splits = {1, 1, 0};
       },
       {"sum to 2", "first dimension is 3"}},
      {Kind::kAllreduce, [](Operation* o) { o->request.group = 7; }, {"no process set 7"}},
  };
  Cluster cluster(Fabric::kLoopback, 3);
  cluster.Run([&](int rank, Engine& engine) {
    for (const Refusal& refusal : refusals) {
      Bytes data = ValuesOf(DType::kFloat32, 6, rank);
      const OperationPtr operation = MakeOperation(refusal.kind, "the name");
      operation->request.op = ReduceOp::kSum;
      if (refusal.kind != Kind::kBarrier)
        AddTensor(operation.get(), MetaOf(DType::kFloat32, {3, 2}), data, &data);
      if (refusal.kind == Kind::kAlltoall) operation->request.splits = {1, 1, 1};
      refusal.spoil(operation.get());
      std::vector<std::string> parts = refusal.parts;
      parts.push_back(operation->Describe());
      ExpectFails(engine.Enqueue(operation), StatusCode::kInvalidArgument, parts);
    }
    // One rank alone is refused: the others' operations still match.
    ExpectOk(RunAllreduce(&engine, "the name", 10, 1));
    ExpectOk(RunAllreduce(&engine, "", 10, 1));
  });
}

}  // namespace
}  // namespace bagua
