import { setTimeout as sleep } from "node:timers/promises";
import { encodeMsgpack } from "@kv/protocol";
import { Publisher, Router } from "zeromq";

/** A publisher of KV events like vLLM's, with its replay socket. */
export interface EventPublisher {
  /** The sequence numbers from which replays were asked for. */
  readonly asked: readonly bigint[];
  readonly endpoint: string;
  readonly replayEndpoint: string | undefined;
  /** Publishes a batch. A `lost` one goes into the replay buffer alone. */
  publish(
    events: readonly object[],
    options?: { readonly lost?: boolean; readonly sequence?: bigint },
  ): Promise<void>;
  close(): void;
}

/** Starts a publisher on the loopback. `bufferSteps`: how many batches it keeps for replays. */
export async function startEventPublisher({
  at = "tcp://127.0.0.1:*",
  bufferSteps = 10_000,
  replays = true,
  encode = encodeMsgpack,
} = {}): Promise<EventPublisher> {
  const [live, replay] = [new Publisher({ linger: 0 }), new Router({ linger: 0 })];
  for (let attempt = 0; ; attempt += 1) {
    try {
      await live.bind(at);
      break;
    } catch (error) {
      // A port that another socket has just left is free a moment later.
      if (attempt === 100) throw error;
      await sleep(50);
    }
  }
  await replay.bind("tcp://127.0.0.1:*");
  const buffer: [bigint, Uint8Array][] = [];
  const asked: bigint[] = [];
  let next = 0n;
  void (async () => {
    for await (const [identity, delimiter, request] of replay) {
      if (identity === undefined || delimiter === undefined || request === undefined) continue;
      const first = request.readBigUInt64BE();
      asked.push(first);
      for (const [sequence, payload] of buffer)
        if (sequence >= first)
          await replay.send([identity, "", "", sequenceFrame(sequence), payload]);
      await replay.send([identity, "", "", sequenceFrame(-1n), ""]);
    }
  })().catch(() => {});
  return {
    asked,
    endpoint: live.lastEndpoint ?? "",
    replayEndpoint: replays ? (replay.lastEndpoint ?? "") : undefined,
    async publish(events, { lost = false, sequence = next } = {}) {
      const payload = encode([Number(next) + Math.random(), events, 0]);
      next = sequence + 1n;
      buffer.push([sequence, payload]);
      if (buffer.length > bufferSteps) buffer.shift();
      if (!lost) await live.send(["", sequenceFrame(sequence), payload]);
    },
    close() {
      live.close();
      replay.close();
    },
  };
}

function sequenceFrame(sequence: bigint): Buffer {
  const bytes = Buffer.alloc(8);
  bytes.writeBigInt64BE(sequence);
  return bytes;
}
