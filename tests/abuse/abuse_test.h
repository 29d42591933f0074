// Every field of every unary request wrong once, on rank 1 of two: what both ranks answer, line by
// line as abuse_table.txt says, and a valid step that gives the same bits afterwards.
//
// A line is "<Method> <field>=<how> -> <rank 1's answer> | <rank 0's answer>"; an answer is OK, or
// code, reason and the paths of the fields named; where it depends on which rank is first, "A or
// B". EXPERTD_ABUSE_RECORD=<file> writes what was seen instead of comparing: read the difference
// before committing it.
#ifndef TESTS_ABUSE_ABUSE_TEST_H_
#define TESTS_ABUSE_ABUSE_TEST_H_
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "base/error.h"
#include "base/strings.h"
#include "client/cpp/bootstrap.h"
#include "client/cpp/tensor.h"
#include "tests/testing/service_harness.h"
#include "tests/testing/spoil.h"

namespace expertd::abuse {

using testing::Backend;
using testing::ServiceHarness;
using testing::Spoilt;

inline constexpr char kLayer[] = "layer";
inline constexpr int64_t kHidden = 8;
inline constexpr int64_t kTokens = 2;
inline constexpr int64_t kTopK = 2;
inline constexpr int64_t kExperts = 4;
inline constexpr size_t kMaxMessage = 2048;
// Of a call that waits for what never comes.
inline constexpr absl::Duration kInVain = absl::Milliseconds(400);

inline std::string AnswerText(const absl::Status& status) {
  if (status.ok()) return "OK";
  const ErrorDetail detail = DetailOf(status);
  std::string text =
      StrCat(absl::StatusCodeToString(status.code()), " ", ReasonName(detail.reason));
  for (const FieldViolation& violation : detail.violations) StrAppend(&text, " ", violation.path);
  return text;
}

inline v1::LayerConfig LayerOf() {
  v1::LayerConfig config;
  config.set_expert_count(kExperts);
  config.set_hidden(kHidden);
  config.set_intermediate(4);
  config.set_top_k(kTopK);
  config.set_activation(v1::ACTIVATION_SILU);
  config.set_alignment(1);
  config.set_token_dtype(v1::DTYPE_F32);
  config.set_weight_dtype(v1::DTYPE_F32);
  config.set_recipe("bf16");
  config.set_weighting(v1::WEIGHTING_LATE);
  config.mutable_router()->set_kind(v1::ROUTER_KIND_NONE);
  config.mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_SGD);
  return config;
}

inline v1::Tensor Rows(int64_t rows, int64_t columns) {
  std::vector<float> values;
  for (int64_t i = 0; i < rows * columns; ++i) values.push_back(static_cast<float>(i % 7 - 3) / 4);
  return client::FloatTensor(v1::DTYPE_F32, {rows, columns}, values);
}
inline v1::Tensor Ids() {
  return client::Int64Tensor({kTokens, kTopK}, std::vector<int64_t>{0, 1, 2, 3});
}

// A request whose first field is a layer.
template <typename Request>
Request OfLayer(const std::string& layer_id) {
  Request request;
  request.set_layer_id(layer_id);
  return request;
}

class AbuseTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto started = ServiceHarness::Start({Backend::kLoopback, 2});
    ASSERT_TRUE(started.ok()) << started.status();
    service_ = *std::move(started);
    FormAgain();
    v1::CreateLayerRequest create;
    create.set_layer_id(kLayer);
    *create.mutable_config() = LayerOf();
    Must(create);
    v1::InitializeWeightsRequest initialize;
    initialize.set_layer_id(kLayer);
    initialize.set_seed(7);
    Must(initialize);
    good_ = ForwardText();
    ReadTable();
  }
  void TearDown() override {
    if (const char* file = std::getenv("EXPERTD_ABUSE_RECORD")) {
      std::ofstream out(file, std::ios::app);
      for (const std::string& line : seen_) out << line << "\n";
    }
  }

  void FormAgain() {
    service_->Forget();
    const absl::Status formed = service_->Form(Config());
    ASSERT_TRUE(formed.ok()) << formed;
  }
  static v1::GroupConfig Config() {
    v1::GroupConfig config = testing::SmallGroup({Backend::kLoopback, 2});
    config.set_capacity_policy(v1::CAPACITY_POLICY_REFUSE);
    return config;
  }

  // A step on both ranks that has to work.
  template <typename Request>
  std::vector<client::ResponseOf<Request>> Must(const Request& request) {
    auto responses = service_->driver().RunSame(request);
    EXPECT_TRUE(responses.ok()) << responses.status();
    if (!responses.ok()) return std::vector<client::ResponseOf<Request>>(2);
    return *std::move(responses);
  }

  static v1::ForwardRequest Forward() {
    v1::ForwardRequest request;
    request.set_layer_id(kLayer);
    *request.mutable_tokens() = Rows(kTokens, kHidden);
    *request.mutable_topk()->mutable_topk_ids() = Ids();
    *request.mutable_topk()->mutable_topk_weights() = Rows(kTokens, kTopK);
    return request;
  }
  std::string ForwardText() {
    std::string text;
    for (const auto& response : Must(Forward())) text += response.output().data();
    return text;
  }

  // The group serves a step as if nothing had happened. A sequence that the wrong request has
  // spoilt further ahead is passed over first.
  void ExpectWorks(const std::string& after) {
    int good = 0;
    for (int tries = 0; tries < 6 && good < 2; ++tries) {
      service_->driver().Distrust();
      auto replies = service_->driver().RunEach(std::vector<v1::ForwardRequest>(2, Forward()));
      std::string text;
      for (const auto& response : replies.responses) text += response.output().data();
      good = text == good_ ? good + 1 : 0;
    }
    ASSERT_EQ(good, 2) << after << " leaves a group that does not work";
  }

  // Compares one answer with its line of the table.
  void Expect(const std::string& key, const absl::Status& guilty, const std::string& other) {
    const std::string answer = StrCat(AnswerText(guilty), other.empty() ? "" : " | ", other);
    seen_.push_back(StrCat(key, " -> ", answer));
    EXPECT_LE(guilty.message().size(), kMaxMessage) << key;
    if (!guilty.ok()) {
      EXPECT_NE(guilty.code(), absl::StatusCode::kUnknown) << key << guilty;
      EXPECT_NE(guilty.code(), absl::StatusCode::kInternal) << key << guilty;
    }
    if (guilty.code() == absl::StatusCode::kInvalidArgument) {
      EXPECT_FALSE(DetailOf(guilty).violations.empty()) << key << ": no field is named: " << guilty;
    }
    if (std::getenv("EXPERTD_ABUSE_RECORD") != nullptr) return;
    const auto line = table_.find(key);
    if (line == table_.end()) {
      ADD_FAILURE() << "abuse_table.txt has no line for: " << key << " -> " << answer;
      return;
    }
    const std::vector<std::string> allowed = absl::StrSplit(line->second, " or ");
    EXPECT_THAT(allowed, ::testing::Contains(answer)) << key << "\n" << guilty;
  }

  // Short for a call that the table says waits in vain; for others far above what they take.
  client::CallOptions Patience(const std::string& key) const {
    const auto line = table_.find(key);
    const bool in_vain = line == table_.end() || absl::StrContains(line->second, "STEP_TIMEOUT") ||
                         absl::StrContains(line->second, "SEQUENCE_GAP");
    return {.deadline = absl::Now() + (in_vain ? kInVain : testing::kWait), .retry_window = {}};
  }

  // `make` gives a valid request for both ranks, with everything it refers to in place.
  template <typename Request>
  void SpoilCollective(const std::function<Request()>& make,
                       const std::string& method = client::Method<Request>::kName) {
    Request valid = make();
    service_->driver().Distrust();
    *valid.mutable_header() = Header();
    for (const Spoilt& spoilt : testing::SpoilEveryField(valid)) {
      const Request fresh = make();  // refreshes tickets and handles that the last one has used
      const v1::StepHeader header = Header();
      std::vector<Request> requests(2, fresh);
      // The wrong field over the fresh request: headers and handles change from case to case.
      requests[1] = Over<Request>(valid, static_cast<const Request&>(*spoilt.request), fresh);
      *requests[0].mutable_header() = header;
      const bool alone = absl::StartsWith(spoilt.label, "header");
      std::string other;
      absl::Status guilty;
      if (alone) {
        SpoilHeader(spoilt.label, header, requests[1].mutable_header());
        guilty = service_->rank(1)
                     .Call(requests[1], Patience(StrCat(method, " ", spoilt.label)))
                     .status();
      } else {
        *requests[1].mutable_header() = header;
        const std::vector<client::RankClient*> ranks = service_->group().clients();
        auto replies = client::CallAll(absl::MakeConstSpan(ranks), requests, testing::Soon());
        guilty = replies.statuses[1];
        other = AnswerText(replies.statuses[0]);
      }
      Expect(StrCat(method, " ", spoilt.label), guilty, other);
      ExpectWorks(StrCat(method, " ", spoilt.label));
      if (HasFatalFailure()) return;
    }
  }

  // A request that one rank answers by itself.
  template <typename Request>
  void SpoilQuery(const std::function<Request()>& make,
                  const std::function<void()>& restore = nullptr) {
    const Request valid = make();
    for (const Spoilt& spoilt : testing::SpoilEveryField(valid)) {
      const std::string key = StrCat(client::Method<Request>::kName, " ", spoilt.label);
      Request request = Over(valid, static_cast<const Request&>(*spoilt.request), make());
      const auto answer = service_->rank(1).Call(request, Patience(key));
      Expect(key, answer.status(), "");
      if (restore) restore();
      ExpectWorks(key);
      if (HasFatalFailure()) return;
    }
  }

  v1::StepHeader Header() { return service_->driver().NextHeader(); }

  std::unique_ptr<ServiceHarness> service_;

 private:
  // Takes from `spoilt` what differs from `valid`, and from `fresh` the rest: per top-level field.
  template <typename Request>
  static Request Over(const Request& valid, const Request& spoilt, const Request& fresh) {
    Request result = fresh;
    const auto* descriptor = Request::descriptor();
    for (int i = 0; i < descriptor->field_count(); ++i) {
      const auto* field = descriptor->field(i);
      Request a;
      Request b;
      CopyField(valid, field, &a);
      CopyField(spoilt, field, &b);
      if (a.SerializeAsString() == b.SerializeAsString()) continue;
      result.GetReflection()->ClearField(&result, field);
      CopyField(spoilt, field, &result);
    }
    return result;
  }
  static void CopyField(const google::protobuf::Message& from,
                        const google::protobuf::FieldDescriptor* field,
                        google::protobuf::Message* to) {
    std::unique_ptr<google::protobuf::Message> copy(from.New());
    copy->CopyFrom(from);
    const auto* descriptor = from.GetDescriptor();
    for (int i = 0; i < descriptor->field_count(); ++i) {
      if (descriptor->field(i) != field) {
        copy->GetReflection()->ClearField(copy.get(), descriptor->field(i));
      }
    }
    to->MergeFrom(*copy);
  }
  // Puts the wrong part of a header over the current one.
  static void SpoilHeader(const std::string& label, const v1::StepHeader& now,
                          v1::StepHeader* header) {
    v1::StepHeader spoilt = now;
    if (absl::StartsWith(label, "header=")) {
      spoilt.Clear();
    } else if (absl::StartsWith(label, "header.group_id")) {
      spoilt.set_group_id(header->group_id());
    } else if (absl::StartsWith(label, "header.epoch")) {
      spoilt.set_epoch(header->epoch());
    } else if (label == "header.sequence=next") {
      spoilt.set_sequence(now.sequence() + 1);
    } else if (absl::StartsWith(label, "header.sequence")) {
      spoilt.set_sequence(header->sequence());
    } else {
      spoilt.set_request_id(header->request_id());
    }
    *header = spoilt;
  }

  void ReadTable() {
    const char* source = std::getenv("EXPERTD_SOURCE_DIR");
    ASSERT_NE(source, nullptr) << "EXPERTD_SOURCE_DIR says where abuse_table.txt is";
    std::ifstream in(StrCat(source, "/tests/abuse/abuse_table.txt"));
    std::string line;
    while (std::getline(in, line)) {
      const size_t arrow = line.find(" -> ");
      if (arrow != std::string::npos) table_[line.substr(0, arrow)] = line.substr(arrow + 4);
    }
  }

  std::string good_;
  std::map<std::string, std::string> table_;
  std::vector<std::string> seen_;
};

}  // namespace expertd::abuse

#endif  // TESTS_ABUSE_ABUSE_TEST_H_
