import { zmqSideChannel } from "@kv/connector";
import type { KvTransferParams } from "@kv/interface";
import { createSimEngine, type SimEngine } from "@kv/testing/simulator/sim-engine";
import { memoryNetwork } from "@kv/transport-memory";

// A child process with a P, a D and a listener of an attacker. Their side channels are ports of the loopback, their KV is checked byte by byte.

/** A request of the parent. `prefill` and `decode` are what clients and the proxy post. */
export type Order =
  | { readonly id: number; readonly kind: "start"; readonly extra: Readonly<Record<string, unknown>> }
  | { readonly id: number; readonly kind: "prefill"; readonly request: string; readonly prompt: number }
  | {
      readonly id: number;
      readonly kind: "decode";
      readonly request: string;
      readonly prompt: number;
      readonly params: KvTransferParams;
    }
  | { readonly id: number; readonly kind: "state" };

/** The answer to an order. */
export interface OrderAnswer {
  readonly id: number;
  readonly answer: unknown;
}

const NUM_TOKENS = 80;
const network = memoryNetwork();
const violations: string[] = [];
let engines: Record<"p" | "d" | "rogue", SimEngine> | undefined;

async function start(extra: Readonly<Record<string, unknown>>) {
  const engine = (hostName: string, engineId: string, plain: boolean) =>
    createSimEngine({
      ...{ network, hostName, engineId, tpSize: 1, blockSize: 16, numBlocks: 512, plain },
      extra: plain ? {} : extra,
      sideChannel: zmqSideChannel(),
      violation: (what) => void violations.push(what),
    });
  engines = {
    p: await engine("p", "p", false),
    d: await engine("d", "d", false),
    rogue: await engine("rogue", "p", true),
  };
  await engines.rogue.prefill({ requestId: "garbage", prompt: 999_983, numTokens: 8000 });
  return { rogue: engines.rogue.address, prefill: engines.p.address };
}

async function answer(order: Order): Promise<unknown> {
  if (order.kind === "start") return start(order.extra);
  if (engines === undefined) throw new Error("not started");
  if (order.kind === "state") return { violations, outstanding: engines.p.outstanding() };
  const { request: requestId, prompt } = order;
  if (order.kind === "prefill") return engines.p.prefill({ requestId, prompt, numTokens: NUM_TOKENS });
  return engines.d.decode({ requestId, prompt, numTokens: NUM_TOKENS, params: order.params }).then(
    () => "ok",
    (error: { code?: string; message?: string }) => `${error.code}: ${error.message}`,
  );
}

process.on("message", (order: Order) => {
  void answer(order).then((result) => process.send?.({ id: order.id, answer: result } satisfies OrderAnswer));
});
process.once("disconnect", () => process.exit(0));
