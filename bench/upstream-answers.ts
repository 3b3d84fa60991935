// What the servers of the proxy benchmarks answer.
import { startEventPublisher } from "../packages/fleet/test/support/event-publisher.js";

const EVENTS = 16;
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

export function prefillAnswer(engineId: string, sideChannel: number): string {
  const params =
    `{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1,2,3,4]],"remote_engine_id":"${engineId}","remote_request_id":"r",` +
    `"remote_host":"127.0.0.1","remote_port":${sideChannel},"tp_size":1,"remote_num_tokens":64,"transfer_mode":"pull"}`;
  return `{"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"x","finish_reason":"length"}],"kv_transfer_params":${params}}`;
}

/** Publishes blocks that come and go. Returns the answer of `GET /kv_event_sources`. */
export async function publishEvents(): Promise<string> {
  const { endpoint, replayEndpoint, publish } = await startEventPublisher({ bufferSteps: 100 });
  const stored = (hash: number, tokens: readonly number[]) => ({
    ...{ type: "BlockStored", block_hashes: [hash], parent_block_hash: null, token_ids: tokens },
    ...{ block_size: tokens.length, lora_id: null, medium: "GPU", lora_name: null, group_idx: 0 },
  });
  let hash = 0;
  setInterval(() => {
    hash += 1;
    const removed = { type: "BlockRemoved", block_hashes: [hash - 100], medium: "GPU", group_idx: 0 };
    void publish([stored(hash, Array(BLOCK_TOKENS).fill(1000 + hash)), removed]).catch(() => {});
  }, BATCH_INTERVAL_MS).unref();
  return JSON.stringify({ 0: { publisher: "zmq", endpoint, replay_endpoint: replayEndpoint } });
}
