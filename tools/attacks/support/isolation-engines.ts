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
import { answerCalls } from "../../faults/child-calls.js";

// A child process with a P, a D and a listener of an attacker. Their side channels are ports of the
// loopback, their KV is checked byte by byte.

const NUM_TOKENS = 80;
const network = memoryNetwork();
const violations: string[] = [];
const atPrefill = injectableTransport();
let processOfD = "";
const atDecode = injectableTransport(undefined, (payload) => {
  const sent = decodeNotification(payload);
  if (sent.kind === "push-registration")
    processOfD = String(
      (sent.registration.kv_peer as { incarnation?: unknown } | undefined)?.incarnation,
    );
});
let engines: Record<"p" | "d" | "rogue", SimEngine> | undefined;

function started() {
  if (engines === undefined) throw new Error("not started");
  return engines;
}

/** `prefill` and `decode` are what clients and the proxy post. */
const functions = {
  /** Starts the engines. `extra`: the `kv_connector_extra_config` of P and D. */
  async start(connector: "pull" | "push", extra: Readonly<Record<string, unknown>>) {
    const engine = (hostName: string, engineId: string, more: Partial<SimEngineOptions>) =>
      createSimEngine({
        network,
        hostName,
        engineId,
        tpSize: 1,
        blockSize: 16,
        numBlocks: 512,
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
  },
  /** The parameters that P's answer has. */
  prefill: (requestId: string, prompt: number) =>
    started().p.prefill({ requestId, prompt, numTokens: NUM_TOKENS }),
  /** `ok`, or the error of D's answer. */
  decode: (requestId: string, prompt: number, params: KvTransferParams): Promise<string> =>
    started()
      .d.decode({ requestId, prompt, numTokens: NUM_TOKENS, params })
      .then(
        () => "ok",
        (error: { code?: string; message?: string }) => `${error.code}: ${error.message}`,
      ),
  /**
   * Sends P and D each forged notification, from each agent that they know and from one that they
   * do not; returns their number.
   */
  forge(others: Omit<Known, "decode">): number {
    const known = {
      ...others,
      decode: { ...started().d.address, incarnation: processOfD, tpSize: 1 },
    };
    const forPrefill = Object.values(FORGED_FOR_PREFILL);
    const forDecode = Object.values(FORGED_FOR_DECODE);
    for (const make of forPrefill) atPrefill.inject(make(known));
    for (const make of forDecode) atDecode.inject(make(known));
    return forPrefill.length + forDecode.length;
  },
  /** Where D has had bytes of another prompt. */
  violations: () => violations,
};
export type IsolationFunctions = typeof functions;

process.once("disconnect", () => process.exit(0));
answerCalls(functions);
