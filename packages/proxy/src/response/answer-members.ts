export type ValueEdit = (value: string) => string | Promise<string>;

/** `null`: the value becomes `null`, however long it is. */
export type MemberEdits = Readonly<Record<string, ValueEdit | null>>;

/**
 * Whose answer has a member when P computed the prompt. `merged`: several. `dropped`: it names
 * hosts and blocks, so no client gets it. `left-out`: none has it whole, and the header
 * `x-kv-left-out` names it.
 */
export type AnswerMemberUse = "decode" | "merged" | "dropped" | "left-out";

const MEMBERS: Readonly<Record<AnswerMemberUse, string>> = {
  decode:
    "object created model type role choices.text choices.message choices.delta choices.logprobs choices.finish_reason choices.stop_reason choices.token_ids " +
    "choices.weight_versions stop_reason stop_sequence content output output_messages service_tier system_fingerprint metrics created_at incomplete_details status " +
    // D has the prompt's text and tokens, only not its KV.
    "choices.prompt_token_ids prompt_token_ids prompt_text input_messages " +
    // A request for them has one leg, at P.
    "prompt_logprobs choices.prompt_logprobs " +
    // The Responses API repeats the request.
    "instructions metadata parallel_tool_calls temperature tool_choice tools top_p background max_output_tokens max_tool_calls previous_response_id prompt " +
    "prompt_cache_options prompt_cache_key prompt_cache_retention reasoning safety_identifier text top_logprobs truncation user presence_penalty frequency_penalty",
  // The id is the client's, the usage's cached tokens are P's.
  merged: "id choices choices.index usage",
  dropped: "kv_transfer_params ec_transfer_params",
  // D has no rows for the prompt, P none for the answer.
  "left-out": "choices.routed_experts",
};

/**
 * Members of vLLM's answers, 0.31 to 0.33, by path. A test compares them with
 * `fixtures/vllm-api.json`.
 */
export const ANSWER_MEMBERS: ReadonlyMap<string, AnswerMemberUse> = new Map(
  Object.entries(MEMBERS).flatMap(([use, paths]) =>
    paths.split(" ").map((path) => [path, use as AnswerMemberUse] as const),
  ),
);

export type Fields = Readonly<Record<string, unknown>>;

const namesOf = (use: AnswerMemberUse) =>
  MEMBERS[use].split(" ").map((path) => path.replace(/^.*\./, ""));
const DROPPED = namesOf("dropped");
/** Members of a choice that neither instance has whole. */
export const LEFT_OUT = namesOf("left-out");

const nulled = (names: readonly string[]): MemberEdits =>
  Object.fromEntries(names.map((name) => [name, null]));
/** Edits that hide what no client gets. */
export const HIDDEN = nulled(DROPPED);
/** Edits that hide what no client gets when P computed the prompt. */
export const HIDDEN_OR_LEFT_OUT = nulled([...DROPPED, ...LEFT_OUT]);

/** Matches up to the value of an edited member. */
export const EDITED_MEMBERS = new RegExp(
  `"(usage|${[...DROPPED, ...LEFT_OUT].join("|")})"\\s*:\\s*(?=\\S)`,
  "g",
);

/** Names of hidden members that the answer should have go to `leftOut`. */
export function hideMembers(
  body: Fields,
  kvFromPrefill: boolean,
  leftOut?: Set<string>,
): Record<string, unknown> {
  const hidden: Record<string, unknown> = { ...body };
  for (const name of DROPPED) if (hidden[name] != null) hidden[name] = null;
  if (!kvFromPrefill || !Array.isArray(body.choices)) return hidden;
  hidden.choices = (body.choices as readonly Fields[]).map((choice) => {
    const names = LEFT_OUT.filter((name) => choice[name] != null);
    for (const name of names) leftOut?.add(name);
    return { ...choice, ...Object.fromEntries(names.map((name) => [name, null])) };
  });
  return hidden;
}
