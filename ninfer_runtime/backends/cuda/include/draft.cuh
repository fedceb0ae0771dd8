// Drafts of a row while they are made, and those that a slot holds between rounds. Mirrored in ops/draft.py.
#pragma once
#include "round.cuh"

constexpr int MAX_DRAFTS = MAX_COLUMNS - 1;
constexpr int MAX_UNCOUNTED = MAX_COLUMNS + MAX_DRAFTS;

// One row of a round (or the one slot of a prompt chunk); an array of MAX_ROWS.
struct DraftState {
    int slot;
    int n_wanted;
    int n_drafts;      // made so far
    int next_index;    // of the token to draft
    int column;        // of the draft layer's output that the next draft comes from
    int is_active;     // whether one is made now
    int n_uncounted;
    int reserved;
    int uncounted[16];  // tokens behind the last count: emitted in this round, then the drafts
    int padding[8];
};
static_assert(sizeof(DraftState) == 128 && MAX_UNCOUNTED <= 16, "mirrored by ops/draft.py");

// What a slot holds: drafts of the tokens behind `anchor`, the sequence's token `index`, which is in no state yet. An index
// of -1: none, whatever the round asks.
struct HeldDrafts {
    int index;
    int anchor;
    int n_drafts;
    int token_ids[MAX_DRAFTS];
    int has_ratio;  // drawn from distributions that lie in the slot's proposals
    int reserved[7];
};
static_assert(sizeof(HeldDrafts) == 64, "mirrored by ops/draft.py");

constexpr int MAX_PROPOSED = 1024;  // PREFIX of the sampler

// What one draft was drawn from; [slots][MAX_DRAFTS] of them.
struct Proposal {
    double probabilities[MAX_PROPOSED];
    int ids[MAX_PROPOSED];
    int n;
    int reserved;
};
static_assert(sizeof(Proposal) == 12 * MAX_PROPOSED + 8, "mirrored by ops/draft.py");

// Whether a row's drafts come from distributions where the program accepts by ratio. Others draw theirs as the target will.
DEVICE bool has_distributions(const RowInput& in) {
    return in.temperature > 0.0 && in.top_k > 0 && in.top_k <= MAX_PROPOSED;
}
