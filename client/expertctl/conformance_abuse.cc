// Conformance under abuse: who is guilty is told so, the others learn who, and the group goes on.
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/status_macros.h"
#include "base/strings.h"
#include "client/cpp/tensor.h"
#include "client/expertctl/conformance.h"
#include "client/expertctl/workload.h"

namespace expertd::expertctl {
namespace {

struct Abuse {
  const char* name;
  Reason reason;
  // Spoils the request of one rank.
  std::function<void(const Conformance&, v1::ForwardRequest*)> spoil;
};

Workload Good(const Conformance& conformance, int64_t rank) {
  return {conformance.layer.config(), 2, 11, rank};
}

void SetIds(const std::vector<int32_t>& ids, const Conformance& conformance,
            v1::ForwardRequest* request) {
  const int64_t top_k = conformance.shape().top_k;
  *request->mutable_topk()->mutable_topk_ids() =
      client::Int32Tensor({static_cast<int64_t>(ids.size()) / top_k, top_k}, ids);
}

std::vector<Abuse> Abuses(const Conformance& conformance) {
  std::vector<Abuse> abuses = {
      {"a token row too short", Reason::kShapeMismatch,
       [](const Conformance& c, v1::ForwardRequest* request) {
         const int64_t hidden = c.layer.config().hidden() - 1;
         *request->mutable_tokens() = client::FloatTensor(
             c.layer.config().token_dtype(), {2, hidden}, std::vector<float>(2 * hidden, 1.0f));
       }},
      {"a payload too short", Reason::kPayloadSizeMismatch,
       [](const Conformance&, v1::ForwardRequest* request) {
         request->mutable_tokens()->mutable_data()->pop_back();
       }},
      {"an integer token dtype", Reason::kDtypeUnsupported,
       [](const Conformance& c, v1::ForwardRequest* request) {
         const int64_t hidden = c.layer.config().hidden();
         *request->mutable_tokens() =
             client::Int32Tensor({2, hidden}, std::vector<int32_t>(2 * hidden, 1));
       }},
      {"expert id equal to the number of experts", Reason::kExpertIdRange,
       [](const Conformance& c, v1::ForwardRequest* request) {
         std::vector<int32_t> ids(2 * c.shape().top_k, -1);
         ids.back() = static_cast<int32_t>(c.shape().experts);
         SetIds(ids, c, request);
       }},
      {"a weight that is not a number", Reason::kNonFiniteWeight,
       [](const Conformance& c, v1::ForwardRequest* request) {
         std::vector<float> weights(2 * c.shape().top_k, 0.5f);
         weights.front() = std::numeric_limits<float>::quiet_NaN();
         *request->mutable_topk()->mutable_topk_weights() =
             client::FloatTensor(v1::DTYPE_F32, {2, c.shape().top_k}, weights);
       }},
      {"more tokens than the limit", Reason::kTokensOverLimit,
       [](const Conformance& c, v1::ForwardRequest* request) {
         Workload workload = Good(c, 0);
         workload.tokens = c.session->group.config().max_tokens_per_rank() + 1;
         *request = RandomForward(workload, c.layer.layer_id());
       }},
      {"a layer that does not exist", Reason::kLayerUnknown,
       [](const Conformance&, v1::ForwardRequest* request) {
         request->set_layer_id("no such layer");
       }},
  };
  if (conformance.shape().top_k >= 2) {
    abuses.push_back({"the same expert twice in one token", Reason::kDuplicateExpert,
                      [](const Conformance& c, v1::ForwardRequest* request) {
                        std::vector<int32_t> ids(2 * c.shape().top_k, -1);
                        ids[0] = ids[1] = 0;
                        SetIds(ids, c, request);
                      }});
  }
  return abuses;
}

std::vector<v1::ForwardRequest> GoodForwards(const Conformance& conformance) {
  std::vector<v1::ForwardRequest> requests;
  for (int64_t r = 0; r < conformance.ranks(); ++r) {
    requests.push_back(RandomForward(Good(conformance, r), conformance.layer.layer_id()));
  }
  return requests;
}

absl::Status RunAbuse(const Conformance& conformance, const Abuse& abuse, int64_t guilty) {
  std::vector<v1::ForwardRequest> requests = GoodForwards(conformance);
  abuse.spoil(conformance, &requests[guilty]);
  const auto replies = conformance.driver().RunEach(std::move(requests));
  for (int64_t r = 0; r < conformance.ranks(); ++r) {
    const Reason need = r == guilty ? abuse.reason : Reason::kPeerRejected;
    const absl::Status& got = replies.statuses[r];
    if (HasReason(got, need)) continue;
    return Error(Reason::kInternal)
        .Text("rank ", r, ": got ", got.ok() ? "success" : got.ToString(), ", need ",
              ReasonName(need), " (rank ", guilty, " is guilty)");
  }
  return client::AddContext(conformance.driver().Run(GoodForwards(conformance)).status(),
                            "the step after it");
}

}  // namespace

void CheckAbuse(const Conformance& conformance) {
  for (const Abuse& abuse : Abuses(conformance)) {
    conformance.Check(StrCat("abuse: ", abuse.name), [&]() -> absl::Status {
      RETURN_IF_ERROR(RunAbuse(conformance, abuse, 0));
      return RunAbuse(conformance, abuse, conformance.ranks() - 1);
    });
  }
}

}  // namespace expertd::expertctl
