// What the servers of the proxy benchmarks answer.
import { startEventPublisher } from "../../packages/fleet/test/support/event-publisher.js";

/** Events of a stream, a word each. */
export const EVENTS = 16;
const PROMPT_TOKENS = 160;
const BLOCK_TOKENS = 16;
/** Between two batches of KV events; each stores a block and removes one. */
const BATCH_INTERVAL_MS = 20;

export const MODELS = '{"object":"list","data":[{"id":"m","object":"model"}]}';
export const RENDERED = JSON.stringify([
  { token_ids: Array.from({ length: PROMPT_TOKENS }, (_, at) => 3 + at) },
]);
export const EVENT =
  'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":" word"}]}\n\n';
export const DONE = "data: [DONE]\n\n";
export const STREAM = `${EVENT.repeat(EVENTS)}${DONE}`;

const named = (type: string, data: object) =>
  `event: ${type}\ndata: ${JSON.stringify({ type, ...data })}\n\n`;
/** Of routes that end in another way. */
export const STREAMS: Readonly<Record<string, string>> = {
  "/v1/messages":
    named("message_start", {
      message: { id: "msg_1", type: "message", role: "assistant", content: [] },
    }) +
    named("content_block_delta", { index: 0, delta: { type: "text_delta", text: " word" } }).repeat(
      EVENTS,
    ) +
    named("message_stop", {}),
  "/v1/responses":
    named("response.created", { response: { id: "resp_1", output: [] } }) +
    named("response.output_text.delta", { output_index: 0, delta: " word" }).repeat(EVENTS) +
    named("response.completed", { response: { id: "resp_1", output: [] } }),
};
export const WHOLE = JSON.stringify({
  id: "a",
  object: "list",
  data: [],
  content: [],
  output: [],
  choices: [{ index: 0, text: "", finish_reason: "stop" }],
  words: Array(EVENTS).fill(" word"),
});

export function prefillAnswer(engineId: string, sideChannel: number): string {
  const params =
    `{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1,2,3,4]],"remote_engine_id":"${engineId}","remote_request_id":"r",` +
    `"remote_host":"127.0.0.1","remote_port":${sideChannel},"tp_size":1,"remote_num_tokens":64,"transfer_mode":"pull"}`;
  return `{"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"x","finish_reason":"length"}],"kv_transfer_params":${params}}`;
}

/**
 * With the tokens of a lie, also places that contradict one another, and ends of what was not
 * there. Returns the answer of `GET /kv_event_sources`.
 */
export async function publishEvents(lies?: readonly number[]): Promise<string> {
  const { endpoint, replayEndpoint, publish } = await startEventPublisher({ bufferSteps: 100 });
  const stored = (hash: number, tokens: readonly number[]) => ({
    type: "BlockStored",
    block_hashes: [hash],
    parent_block_hash: null,
    token_ids: tokens,
    block_size: tokens.length,
    lora_id: null,
    medium: "GPU",
    lora_name: null,
    group_idx: 0,
  });
  let hash = 0;
  setInterval(() => {
    hash += 1;
    const removed = {
      type: "BlockRemoved",
      block_hashes: [hash - 100],
      medium: "GPU",
      group_idx: 0,
    };
    const lie = [
      stored(hash, (lies ?? []).slice(0, BLOCK_TOKENS)),
      { ...removed, block_hashes: Array.from({ length: 1000 }, (_, at) => hash + 1000 + at) },
      ...(hash % 50 === 0
        ? [{ type: "AllBlocksCleared" }, { type: "BlockStored", token_ids: "no" }]
        : []),
    ];
    const events = [
      stored(hash, Array(BLOCK_TOKENS).fill(1000 + hash)),
      removed,
      ...(lies ? lie : []),
    ];
    const wrong = lies && hash % 100 === 0 ? { sequence: 3n } : {};
    void publish(events, wrong).catch(() => {});
  }, BATCH_INTERVAL_MS).unref();
  return JSON.stringify({ 0: { publisher: "zmq", endpoint, replay_endpoint: replayEndpoint } });
}
