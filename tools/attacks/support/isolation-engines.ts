import type { KvTransferParams } from "@kv/interface";
import { decodeNotification } from "@kv/protocol";
import { pullConnector } from "@kv/pull";
import { pushConnector } from "@kv/push";
import { zmqSideChannel } from "@kv/side-channel";
import { FORGED_FOR_DECODE, FORGED_FOR_PREFILL, type Known } from "@kv/testing/isolation/attacks";
import { injectableTransport } from "@kv/testing/isolation/injectable-transport";
import { createSimEngine, type SimEngine } from "@kv/testing/simulator/sim-engine";
import type { SimEngineOptions } from "@kv/testing/simulator/sim-options";
import { memoryNetwork } from "@kv/transport-memory";

// A child process with a P, a D and a listener of an attacker. Their side channels are ports of the loopback, their KV is checked byte by byte.

/** A request of the parent. `prefill` and `decode` are what clients and the proxy post. */
export type Order =
  | {
      readonly id: number;
      readonly kind: "start";
      readonly connector: "pull" | "push";
      readonly extra: Readonly<Record<string, unknown>>;
    }
  | { readonly id: number; readonly kind: "prefill"; readonly request: string; readonly prompt: number }
  | {
      readonly id: number;
      readonly kind: "decode";
      readonly request: string;
      readonly prompt: number;
      readonly params: KvTransferParams;
    }
  | {
      readonly id: number;
      readonly kind: "forge";
      readonly known: Omit<Known, "decode">;
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
const atPrefill = injectableTransport();
let processOfD = "";
const atDecode = injectableTransport(undefined, (payload) => {
  const sent = decodeNotification(payload);
  if (sent.kind === "push-registration")
    processOfD = String((sent.registration.kv_peer as { incarnation?: unknown } | undefined)?.incarnation);
});
let engines: Record<"p" | "d" | "rogue", SimEngine> | undefined;

async function start({ connector, extra }: Extract<Order, { kind: "start" }>) {
  const engine = (hostName: string, engineId: string, more: Partial<SimEngineOptions>) =>
    createSimEngine({
      ...{ network, hostName, engineId, tpSize: 1, blockSize: 16, numBlocks: 512 },
      connector: connector === "pull" ? pullConnector : pushConnector,
      sideChannel: zmqSideChannel(),
      violation: (what) => void violations.push(what),
      ...more,
    });
  engines = {
    p: await engine("p", "p", { extra, wrapTransport: atPrefill.wrap }),
    d: await engine("d", "d", { extra, wrapTransport: atDecode.wrap }),
    rogue: await engine("rogue", "p", { plain: true }),
  };
  await engines.rogue.prefill({ requestId: "garbage", prompt: 999_983, numTokens: 8000 });
  return { rogue: engines.rogue.address, prefill: engines.p.address };
}

/** Every forged notification to P and to D, from each agent that they know and from one that they do not. */
function forge(known: Known): number {
  const forPrefill = Object.values(FORGED_FOR_PREFILL);
  const forDecode = Object.values(FORGED_FOR_DECODE);
  for (const make of forPrefill) atPrefill.inject(make(known));
  for (const make of forDecode) atDecode.inject(make(known));
  return forPrefill.length + forDecode.length;
}

async function answer(order: Order): Promise<unknown> {
  if (order.kind === "start") return start(order);
  if (engines === undefined) throw new Error("not started");
  if (order.kind === "forge") {
    const decode = { ...engines.d.address, incarnation: processOfD, tpSize: 1 };
    return forge({ ...order.known, decode });
  }
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
