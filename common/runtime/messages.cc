// Encoding of what coordinator and ranks say to each other.
#include "common/runtime/coordinator.h"
#include "common/runtime/plan_table.h"

namespace bagua {
namespace {

constexpr uint8_t kKnown = 1;
constexpr uint8_t kAgreed = 2;
constexpr uint8_t kFailed = 3;
constexpr uint8_t kServed = 4;

void Encode(const Agreement& agreement, Writer* writer) {
  if (!agreement.error.ok()) {
    writer->Put(kFailed);
    writer->Put(agreement.sequence);
    writer->PutString(agreement.name);
    writer->Put(static_cast<uint8_t>(agreement.error.code()));
    writer->PutString(agreement.error.message());
  } else if (agreement.known) {
    writer->Put(kKnown);
    writer->Put(agreement.id);
    writer->Put(agreement.sequence);
  } else {
    writer->Put(agreement.served ? kServed : kAgreed);
    writer->Put(agreement.id);
    writer->Put(agreement.sequence);
    writer->PutString(agreement.name);
    writer->PutList(agreement.sizes);
    if (agreement.served) Encode(*agreement.served, writer);
  }
}

bool Decode(Reader* reader, Agreement* agreement) {
  const auto form = reader->Get<uint8_t>();
  if (form == kFailed) {
    agreement->sequence = reader->Get<uint64_t>();
    agreement->name = reader->GetString();
    const auto code = reader->Get<uint8_t>();
    std::string text = reader->GetString();
    if (code == 0 || code > static_cast<uint8_t>(StatusCode::kInternal)) return false;
    agreement->error = Status(static_cast<StatusCode>(code), std::move(text));
    return reader->ok();
  }
  agreement->id = reader->Get<uint32_t>();
  agreement->sequence = reader->Get<uint64_t>();
  agreement->known = form == kKnown;
  if (form == kAgreed || form == kServed) {
    agreement->name = reader->GetString();
    agreement->sizes = reader->GetList<int64_t>();
  }
  if (form == kServed) {
    Result<Request> request = DecodeRequest(reader);
    if (!request.ok()) return false;
    agreement->served = std::move(request).value();
  }
  return reader->ok() && (form == kKnown || form == kAgreed || form == kServed);
}

}  // namespace

void Encode(const Submission& submission, Writer* writer) {
  writer->Put(submission.id);
  writer->Put(submission.sequence);
  if (submission.id != 0) return;
  writer->PutString(submission.name);
  Encode(submission.request, writer);
}

Result<Submission> DecodeSubmission(Reader* reader) {
  Submission submission;
  submission.id = reader->Get<uint32_t>();
  submission.sequence = reader->Get<uint64_t>();
  if (submission.id == 0) {
    submission.name = reader->GetString();
    Result<Request> request = DecodeRequest(reader);
    if (!request.ok()) return request.status();
    submission.request = std::move(request).value();
  }
  if (!reader->ok()) return Status(StatusCode::kInternal, "malformed submission");
  return submission;
}

Bytes Encode(const Response& response) {
  Writer writer;
  writer.PutList(response.forgotten);
  writer.Put(static_cast<uint32_t>(response.units.size()));
  for (const Unit& unit : response.units) {
    writer.Put(static_cast<uint32_t>(unit.agreements.size()));
    for (const Agreement& agreement : unit.agreements) Encode(agreement, &writer);
  }
  writer.Put(static_cast<uint32_t>(response.renewals.size()));
  for (const Renewal& renewal : response.renewals) {
    writer.Put(static_cast<int32_t>(renewal.rank));
    writer.PutString(renewal.name);
    writer.Put(renewal.number);
    writer.Put(renewal.steps);
  }
  writer.PutList(response.joined);
  return writer.Take();
}

Result<Response> DecodeResponse(Reader* reader) {
  Response response;
  response.forgotten = reader->GetList<uint32_t>();
  response.units.resize(reader->GetCount(4));
  for (Unit& unit : response.units) {
    unit.agreements.resize(reader->GetCount(9));
    for (Agreement& agreement : unit.agreements)
      if (!Decode(reader, &agreement)) return Status(StatusCode::kInternal, "malformed response");
  }
  response.renewals.resize(reader->GetCount(20));
  for (Renewal& renewal : response.renewals) {
    renewal.rank = reader->Get<int32_t>();
    renewal.name = reader->GetString();
    renewal.number = reader->Get<uint32_t>();
    renewal.steps = reader->Get<uint64_t>();
  }
  response.joined = reader->GetList<int32_t>();
  const Status whole = reader->Finish("response");
  if (!whole.ok()) return whole;
  return response;
}

void Encode(const PlanNotice& notice, Writer* writer) {
  writer->Put(PlanTable::kMessages);
  writer->Put(notice.kind);
  writer->Put(notice.number);
  writer->Put(notice.step);
}

Result<PlanNotice> DecodePlanNotice(Reader* reader) {
  PlanNotice notice;
  notice.kind = reader->Get<PlanNotice::Kind>();
  notice.number = reader->Get<uint32_t>();
  notice.step = reader->Get<uint64_t>();
  const Status whole = reader->Finish("notice about a plan");
  if (!whole.ok()) return whole;
  if (notice.kind != PlanNotice::Kind::kStepBegun && notice.kind != PlanNotice::Kind::kDropped)
    return Status(StatusCode::kInternal, "malformed notice about a plan");
  return notice;
}

}  // namespace bagua
