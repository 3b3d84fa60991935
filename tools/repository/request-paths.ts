import type { ConnectorModule } from "@kv/interface";
import {
  decodeOk,
  prefillOk,
  STREAM,
  sendStream,
  startUpstream,
} from "@kv/testing/http/fake-upstream";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { createScenario } from "@kv/testing/scenarios/scenario";
import { clientOf, send } from "../../packages/epp/test/support/gateway.js";

/** A warm request of one way of the data: everything is open, and a request has passed before. */
export interface WarmRequest {
  /** Runs the request to its end. */
  run(): Promise<void>;
  close(): Promise<void>;
}

/** The part of a way that one table of docs/architecture.md describes. */
export interface PathTable {
  /** Heading of the table. */
  readonly heading: string;
  /** Heading of a table whose files run here as well; they have no second row. */
  readonly after?: string | undefined;
  /** Name of the module whose files it lists. */
  readonly module: string;
  /** Files that run for the other half of an engine, which gets an empty step. */
  readonly otherHalf?: RegExp;
  /** The most files that may run, without `LEFT_OUT`. The number only goes down. */
  readonly most: number;
}

/** A way of the data through the code. */
export interface RequestPath {
  /** Modules that are loaded, each with a copy of all that it imports, by name. */
  readonly modules: Readonly<Record<string, string>>;
  readonly tables: readonly PathTable[];
  /** Why the way cannot be run on this machine; undefined where it can. */
  readonly missing?: string | undefined;
  /** Brings the modules to where the next request is a warm one. */
  start(modules: Readonly<Record<string, unknown>>): Promise<WarmRequest>;
}

/** Files that have no row: barrels, errors and constants. Files of types run no function. */
export const LEFT_OUT = /\/(index|building-blocks|[a-z-]*errors?|[a-z-]*constants)\.ts$/;

const DECODE_HALF = /\/(decode-worker|decode-requests|(pull|push)\/src\/scheduler)\.ts$/;
const PREFILL_HALF = /\/prefill-(worker|scheduler)\.ts$/;

/** Two simulated engines on the memory transport; each has a connector of its own. */
function connectorPath(
  name: "pull" | "push",
  most: { readonly d: number; readonly p: number },
): RequestPath {
  const file = `packages/${name}/src/index.ts`;
  const title = name === "pull" ? "Pull" : "Push";
  return {
    modules: { [`${name}-d`]: file, [`${name}-p`]: file },
    tables: [
      { heading: `${title}: D`, module: `${name}-d`, otherHalf: PREFILL_HALF, most: most.d },
      { heading: `${title}: P`, module: `${name}-p`, otherHalf: DECODE_HALF, most: most.p },
    ],
    async start(modules) {
      const connector = (side: string) =>
        (modules[`${name}-${side}`] as { readonly default: ConnectorModule }).default;
      const scenario = createScenario();
      const d = await scenario.engine("d", { connector: connector("d") });
      const p = await scenario.engine("p", { connector: connector("p") });
      const request = async (number: number) => {
        const outcome = await scenario.handedOver(p, d, number);
        if (outcome !== "ok") throw new Error(`request ${number} of ${name} ended with ${outcome}`);
        // P frees the blocks.
        await scenario.clock.advance(1000);
      };
      await request(1);
      return { run: () => request(2), close: () => scenario.end() };
    },
  };
}

/** kv-proxy on real sockets, between a client and instances that answer at once. */
function proxied(way: "pulled" | "streamed", most: number): RequestPath {
  const headingOf = (one: typeof way) =>
    `The proxy: a ${one} request, from the socket to the answer`;
  const after = way === "streamed" ? headingOf("pulled") : undefined;
  return {
    modules: { proxy: "packages/proxy/src/index.ts" },
    tables: [{ heading: headingOf(way), after, module: "proxy", most }],
    async start({ proxy: module }) {
      const { createProxy } = module as typeof import("@kv/proxy");
      const prefiller = await startUpstream(prefillOk);
      const decoder = await startUpstream(
        way === "streamed" ? ({ response }) => sendStream(response, STREAM) : decodeOk,
      );
      const proxy = createProxy({
        prefillers: [prefiller.url],
        decoders: [decoder.url],
        pairing: { mode: "off" },
        health: { intervalMs: 0 },
      });
      const { url } = await proxy.listen({ port: 0 });
      const stream = way === "streamed";
      const request = async () => {
        const body = JSON.stringify({ model: "m", prompt: "hello", max_tokens: 8, stream });
        const headers = { "content-type": "application/json" };
        const answer = await fetch(`${url}/v1/completions`, { method: "POST", headers, body });
        if (!answer.ok || (await answer.text()) === "")
          throw new Error(`the answer is ${answer.status}`);
      };
      await request();
      return {
        run: request,
        async close() {
          await proxy.close({ graceMs: 0 });
          await Promise.all([prefiller.close(), decoder.close()]);
        },
      };
    },
  };
}

/** kv-epp on a real socket: a gateway passes the head and the body of a request, and its answer. */
const PICK: RequestPath = {
  modules: { epp: "packages/epp/src/index.ts" },
  tables: [
    { heading: "A pick, from the gateway's stream to its headers", module: "epp", most: 12 },
  ],
  async start({ epp: module }) {
    const { createPicker } = module as typeof import("@kv/epp");
    const picker = createPicker({
      prefillers: ["127.0.0.1:11"],
      decoders: ["127.0.0.1:21"],
      pairing: { mode: "off" },
      health: { intervalMs: 0 },
      tls: false,
    });
    const { port } = await picker.listen({ port: 0 });
    const client = clientOf(port);
    const request = async () => {
      const stream = send(client);
      await stream.choice();
      stream.answer(200);
      await stream.ended;
    };
    await request();
    return {
      run: request,
      async close() {
        client.close();
        await picker.close({ drainMs: 0, graceMs: 0 });
      },
    };
  },
};

/** A READ with a notification between two agents of this process. */
const NATIVE_TRANSFER: RequestPath = {
  modules: { nixl: "packages/nixl/src/index.ts" },
  tables: [{ heading: "A native transfer", module: "nixl", most: 8 }],
  missing: nixlMissing,
  async start({ nixl: module }) {
    const { nixlTransport } = module as typeof import("@kv/nixl");
    const [lengthBytes, count] = [4096, 8];
    const transport = nixlTransport();
    const [reader, owner] = [await transport.createAgent(), await transport.createAgent()];
    const [own, theirs] = [
      transport.allocate(lengthBytes * count),
      transport.allocate(lengthBytes * count),
    ];
    await reader.register(own);
    await owner.register(theirs);
    await reader.addRemote(await owner.localMetadata());
    const rowsOf = ({ address }: { readonly address: number }) => ({
      memoryType: "DRAM" as const,
      rows: Float64Array.of(address, lengthBytes, 0, lengthBytes, count),
    });
    const local = await reader.prepareLocal(rowsOf(own));
    const remote = await reader.prepareRemote(owner.name, rowsOf(theirs));
    const notifications = owner.notifications();
    const ids = Int32Array.of(3, 1);
    const request = async () => {
      const { done, released } = reader.transfer({
        operation: "READ",
        local,
        remote,
        localIds: ids,
        remoteIds: ids,
        notification: Buffer.from("read"),
      });
      await Promise.all([done, released]);
      if ((await notifications.next()).done === true) throw new Error("the agent has closed");
    };
    await request();
    return { run: request, close: () => transport.close() };
  },
};

/** The ways that are measured. */
export const REQUEST_PATHS: readonly RequestPath[] = [
  connectorPath("pull", { d: 21, p: 14 }),
  connectorPath("push", { d: 22, p: 22 }),
  proxied("pulled", 27),
  proxied("streamed", 28),
  PICK,
  NATIVE_TRANSFER,
];
