import { writeFileSync } from "node:fs";
import { createServer, type IncomingMessage, type ServerResponse } from "node:http";
import { join } from "node:path";
import { type Clock, systemClock } from "@kv/interface";
import { listening } from "@kv/testing/http/listening";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { expect, onTestFinished, test } from "vitest";
import type { DiscoveredInstances } from "../discovery/discovery.js";
import { ApiConnection } from "./api-connection.js";
import { kubernetesDiscovery } from "./kubernetes-discovery.js";

type Options = Parameters<typeof kubernetesDiscovery>[0];

/** One request to the API server. */
interface Asked {
  readonly path: string;
  readonly query: URLSearchParams;
  readonly request: IncomingMessage;
  readonly response: ServerResponse;
}

/**
 * A Kubernetes API server over HTTP. Lists are answered with `objects`; watches stay open until the
 * test ends them.
 */
class ApiServer {
  readonly lists: Asked[] = [];
  readonly watches: Asked[] = [];
  readonly folder = scratchFolder(onTestFinished);
  objects: object[] = [];
  version = 100;
  pageSize = Number.POSITIVE_INFINITY;
  token = "first";
  /** Answers in place of the server, once for each entry. */
  readonly scripted: ((asked: Asked) => void)[] = [];
  #port = 0;
  readonly #server = createServer((request, response) => this.#serve(request, response));

  async start(): Promise<this> {
    this.#port = await listening(this.#server, this.#port);
    return this;
  }

  async stop(): Promise<void> {
    const closed = new Promise((resolve) => this.#server.close(resolve));
    this.#server.closeAllConnections();
    await closed;
  }

  /** A kubeconfig whose token is in a file, as that of a service account. */
  kubeconfig(namespace = "models"): string {
    const tokenFile = join(this.folder, "token");
    writeFileSync(tokenFile, this.token);
    const cluster = { server: `http://127.0.0.1:${this.#port}`, "insecure-skip-tls-verify": true };
    const provider = { name: "tokenFile", config: { tokenFile } };
    const path = join(this.folder, "config");
    const config = {
      clusters: [{ name: "c", cluster }],
      users: [{ name: "u", user: { "auth-provider": provider } }],
      contexts: [{ name: "x", context: { cluster: "c", user: "u", namespace } }],
      "current-context": "x",
    };
    writeFileSync(path, JSON.stringify(config));
    return path;
  }

  /** Sends an event on the last watch. */
  event(type: string, object: object): void {
    this.watches.at(-1)?.response.write(`${JSON.stringify({ type, object })}\n`);
  }

  /** Ends the last watch after a bookmark of this version. */
  endWatch(resourceVersion: string): void {
    this.event("BOOKMARK", { metadata: { resourceVersion } });
    this.watches.at(-1)?.response.end();
  }

  #serve(request: IncomingMessage, response: ServerResponse): void {
    const url = new URL(request.url ?? "", "http://x");
    const asked = { path: url.pathname, query: url.searchParams, request, response };
    const isWatch = url.searchParams.get("watch") === "true";
    (isWatch ? this.watches : this.lists).push(asked);
    const script = this.scripted.shift();
    if (script !== undefined) script(asked);
    else if (request.headers.authorization !== `Bearer ${this.token}`) status(asked, 401);
    else if (isWatch) {
      response.writeHead(200, { "content-type": "application/json" });
      response.flushHeaders();
    } else this.#list(asked);
  }

  #list({ query, response }: Asked): void {
    const from = Number(query.get("continue") ?? "0");
    const to = from + this.pageSize;
    const metadata = {
      resourceVersion: String(this.version),
      continue: to < this.objects.length ? String(to) : "",
    };
    response.end(JSON.stringify({ metadata, items: this.objects.slice(from, to) }));
  }
}

function status({ response }: Asked, code: number): void {
  response.writeHead(code, { "content-type": "application/json" });
  response.end(JSON.stringify({ kind: "Status", code, message: `scripted ${code}` }));
}

let serial = 100;
const port = (name: string, containerPort: number) => ({ name, containerPort });

function pod(
  name: string,
  ip: string,
  more: { labels?: object; metadata?: object; ready?: string; ips?: string[] } = {},
) {
  serial += 1;
  return {
    metadata: {
      uid: name,
      name,
      resourceVersion: String(serial),
      labels: { "llm-d.ai/role": "prefill", ...more.labels },
      ...more.metadata,
    },
    spec: {
      containers: [{ name: "vllm", ports: [port("http", 8000), port("side", 5600)] }],
      initContainers: [{ name: "sidecar", ports: [port("sidecar", 9000)] }],
    },
    status: {
      podIP: ip,
      podIPs: (more.ips ?? [ip]).map((each) => ({ ip: each })),
      conditions: [{ type: "Ready", status: more.ready ?? "True" }],
    },
  };
}

async function serving(): Promise<ApiServer> {
  const server = await new ApiServer().start();
  onTestFinished(() => server.stop());
  return server;
}

/** Waits until the server has so many watches. */
const watched = (server: ApiServer, count = 1) =>
  expect.poll(() => server.watches.length).toBe(count);

/** A clock whose waits for the next try are short. */
const fast: Clock = {
  ...systemClock(),
  setTimer: (run, ms, options) => systemClock().setTimer(run, Math.min(ms, 30), options),
};

async function follow(objects: object[], options: Partial<Options> = {}, given?: ApiServer) {
  const server = given ?? (await serving());
  server.objects = objects;
  const discovery = await kubernetesDiscovery({
    kubeconfig: server.kubeconfig(),
    podSelector: "app=vllm",
    clock: fast,
    ...options,
  });
  const seen: DiscoveredInstances[] = [];
  const errors: unknown[] = [];
  const watch = discovery.watch(
    (found) => seen.push(found),
    (error) => errors.push(error),
  );
  onTestFinished(() => watch.close());
  /** The last prefill and decode instances. */
  const urls = () => {
    const { prefillers = [], decoders = [] } = seen.at(-1) ?? {};
    return [prefillers, decoders].map((specs) => specs.map(({ url }) => url).sort());
  };
  return { server, seen, errors, urls, close: () => watch.close() };
}

const P1 = "http://10.0.0.1:8000";
const P2 = "http://10.0.0.2:8000";
const D1 = "http://10.0.1.1:8000";
const asDecode = { labels: { "llm-d.ai/role": "decode" } };

test("lists pods in pages, then follows them by a watch from the list's version", async () => {
  const server = await serving();
  server.pageSize = 1;
  const { urls, errors } = await follow(
    [pod("p1", "10.0.0.1"), pod("d1", "10.0.1.1", asDecode)],
    {},
    server,
  );
  await expect.poll(urls).toEqual([[P1], [D1]]);
  await watched(server);
  const [first] = server.lists;
  expect(first?.path).toBe("/api/v1/namespaces/models/pods");
  expect(first?.query.get("labelSelector")).toBe("app=vllm");
  expect(server.lists.map(({ query }) => query.get("continue"))).toEqual([null, "1"]);
  expect(server.watches[0]?.query.get("resourceVersion")).toBe("100");
  server.event("ADDED", pod("p2", "10.0.0.2"));
  await expect.poll(urls).toEqual([[P1, P2], [D1]]);
  server.event("DELETED", pod("p1", "10.0.0.1"));
  await expect.poll(urls).toEqual([[P2], [D1]]);
  expect(errors).toEqual([]);
});

test("A11: a list without an end is left after 400 pages with an error, and is asked for again later", async () => {
  const server = await serving();
  const page = JSON.stringify({ metadata: { resourceVersion: "1", continue: "more" }, items: [] });
  for (let at = 0; at < 1000; at += 1) server.scripted.push(({ response }) => response.end(page));
  const { errors } = await follow([], { clock: systemClock() }, server);
  await expect.poll(() => errors.length, { timeout: 20_000 }).toBe(1);
  expect(String(errors[0])).toContain("400 pages");
  expect(server.lists.length).toBe(400);
}, 30_000);

test("a pod that is not ready, or that begins to end, is left out at once, and comes back when it is ready", async () => {
  const { server, urls } = await follow([
    pod("p1", "10.0.0.1"),
    pod("p2", "10.0.0.2", { ready: "False" }),
  ]);
  await expect.poll(urls).toEqual([[P1], []]);
  await watched(server);
  server.event("MODIFIED", pod("p2", "10.0.0.2"));
  await expect.poll(urls).toEqual([[P1, P2], []]);
  // Its Ready condition is still true: the pod is to drain before it is not ready any more.
  server.event(
    "MODIFIED",
    pod("p1", "10.0.0.1", { metadata: { deletionTimestamp: "2026-01-01T00:00:00Z" } }),
  );
  await expect.poll(urls).toEqual([[P2], []]);
  server.event("MODIFIED", pod("p2", "10.0.0.2", { ready: "Unknown" }));
  await expect.poll(urls).toEqual([[], []]);
});

test.each([
  ["prefill", {}, [[P1], []]],
  ["decode", {}, [[], [P1]]],
  ["both", {}, [[P1], [P1]]],
  ["prefill-decode", {}, [[P1], [P1]]],
  ["encode-prefill", {}, [[P1], []]],
  ["encode", {}, [[], []]],
  ["both", { port: { prefill: "http", decode: "sidecar" } }, [[P1], ["http://10.0.0.1:9000"]]],
  ["both", { port: { prefill: 7000, decode: "none" } }, [["http://10.0.0.1:7000"], []]],
])("role %s with %j: %j", async (role, options, expected) => {
  const other = pod("d1", "10.0.1.1", { labels: { "llm-d.ai/role": "other" } });
  const { urls, seen } = await follow(
    [pod("p1", "10.0.0.1", { labels: { "llm-d.ai/role": role } }), other],
    options,
  );
  await expect.poll(() => seen.length).toBeGreaterThan(0);
  expect(urls()).toEqual(expected);
});

test("side channel, revision, ranks and own role label come from the pod", async () => {
  const labels = { tier: "decode", "pod-template-hash": "7f", ranks: "2" };
  const { seen } = await follow([pod("d1", "10.0.1.1", { labels })], {
    roleLabel: "tier",
    sideChannelPort: "side",
    revisionLabel: "pod-template-hash",
    dataParallelLabel: "ranks",
  });
  await expect.poll(() => seen.length).toBe(1);
  const own = { url: D1, kv: { host: "10.0.1.1", port: 5600 }, label: "7f" };
  expect(seen[0]).toEqual({
    prefillers: [],
    decoders: [
      { ...own, dataParallelRank: 0 },
      { ...own, dataParallelRank: 1 },
    ],
  });
});

test.each([
  [undefined, ["10.0.0.1", "fd00::1"], P1],
  [undefined, ["fd00::1", "10.0.0.1"], "http://[fd00::1]:8000"],
  [6 as const, ["10.0.0.1", "fd00::1"], "http://[fd00::1]:8000"],
  [6 as const, ["10.0.0.1"], P1],
  [4 as const, ["fd00::1", "10.0.0.1"], P1],
])("of address family %s, a pod with %j is %s", async (ipFamily, ips, expected) => {
  const { urls, seen } = await follow([pod("p1", ips[0] ?? "", { ips })], { ipFamily });
  await expect.poll(() => seen.length).toBe(1);
  expect(urls()).toEqual([[expected], []]);
});

test("bookmarks move the version on, and a watch that the server ends goes on from there", async () => {
  const { server, urls } = await follow([pod("p1", "10.0.0.1")]);
  await watched(server);
  server.endWatch("500");
  await watched(server, 2);
  expect(server.watches[1]?.query.get("resourceVersion")).toBe("500");
  expect(server.watches[1]?.query.get("allowWatchBookmarks")).toBe("true");
  expect(server.lists).toHaveLength(1);
  expect(urls()).toEqual([[P1], []]);
});

test.each(["an event", "a status", "an event between the pages"])(
  "410 Gone as %s: all is listed again, and what went meanwhile is gone",
  async (form) => {
    const { server, urls, errors } = await follow([
      pod("p1", "10.0.0.1"),
      pod("d1", "10.0.1.1", asDecode),
    ]);
    await watched(server);
    server.objects = [pod("p2", "10.0.0.2"), pod("d1", "10.0.1.1", asDecode)];
    server.version = 900;
    const tooOld = { kind: "Status", code: 410, message: "too old" };
    if (form === "an event between the pages") {
      server.pageSize = 1;
      const page = { metadata: { continue: "1" }, items: server.objects.slice(0, 1) };
      // The list's first page passes, its continue token is too old.
      server.scripted.push(
        ({ response }) => response.end(JSON.stringify(page)),
        (asked) => status(asked, 410),
      );
      server.event("ERROR", tooOld);
      await expect.poll(() => server.lists.length).toBe(1 + 4);
    } else if (form === "an event") server.event("ERROR", tooOld);
    else {
      server.scripted.push((asked) => status(asked, 410));
      server.endWatch("200");
    }
    await expect.poll(urls).toEqual([[P2], [D1]]);
    await expect.poll(() => server.watches.at(-1)?.query.get("resourceVersion")).toBe("900");
    if (form !== "an event between the pages") expect(errors).toEqual([]);
  },
);

test("while the API server is away the last instances stay, the error is told, and it is told when all is current again", async () => {
  const { server, urls, errors, seen } = await follow([pod("p1", "10.0.0.1")]);
  await watched(server);
  await server.stop();
  await expect.poll(() => errors.length).toBeGreaterThan(2);
  expect(urls()).toEqual([[P1], []]);
  const before = seen.length;
  await server.start();
  await expect.poll(() => seen.length).toBeGreaterThan(before);
  expect(urls()).toEqual([[P1], []]);
  // The watch goes on: what happened meanwhile comes as events.
  expect(server.lists).toHaveLength(1);
  const told = errors.length;
  server.event("ADDED", pod("p2", "10.0.0.2"));
  await expect.poll(urls).toEqual([[P1, P2], []]);
  expect(errors).toHaveLength(told);
});

test("a connection that breaks in the middle of an event loses nothing", async () => {
  const { server, urls } = await follow([pod("p1", "10.0.0.1")]);
  await watched(server);
  const text = JSON.stringify({ type: "ADDED", object: pod("p2", "10.0.0.2") });
  const { response } = server.watches[0] as Asked;
  response.write(text.slice(0, 40));
  await new Promise((resolve) => response.write("", resolve));
  response.destroy();
  await watched(server, 2);
  server.watches[1]?.response.write(`${text}\n\n`);
  await expect.poll(urls).toEqual([[P1, P2], []]);
});

test("a token that has expired is read again from its file", async () => {
  const { server, urls, errors } = await follow([pod("p1", "10.0.0.1")]);
  await watched(server);
  server.token = "second";
  server.kubeconfig();
  server.endWatch("200");
  await expect
    .poll(() => server.watches.at(-1)?.request.headers.authorization)
    .toBe("Bearer second");
  server.event("ADDED", pod("p2", "10.0.0.2"));
  await expect.poll(urls).toEqual([[P1, P2], []]);
  expect(errors).toEqual([]);
});

test("without the rights, the server's message is told again and again, and no instance is found", async () => {
  const server = await serving();
  for (let at = 0; at < 3; at += 1) server.scripted.push((asked) => status(asked, 403));
  const { errors, seen, urls } = await follow([pod("p1", "10.0.0.1")], {}, server);
  await expect.poll(urls).toEqual([[P1], []]);
  expect(errors.map(String)).toEqual(
    Array(3).fill(
      expect.stringContaining("403 to GET /api/v1/namespaces/models/pods: scripted 403"),
    ),
  );
  expect(seen).toHaveLength(1);
});

test("objects that are not as the API has them are left out", async () => {
  const strange = [
    null,
    {},
    { metadata: { uid: 1 } },
    pod("p3", "not an address"),
    { ...pod("p4", "10.0.0.4"), spec: { containers: "x" } },
  ];
  const { urls, errors } = await follow([...strange, pod("p1", "10.0.0.1")] as object[]);
  await expect.poll(urls).toEqual([[P1], []]);
  expect(errors).toEqual([]);
});

test("wrong options and a kubeconfig that cannot be read are refused", async () => {
  const podSelector = "a=b";
  const kubeconfig = (await serving()).kubeconfig();
  for (const access of [{ kubeconfig: "/nowhere" }, { kubeconfig, context: "other" }])
    await expect(kubernetesDiscovery({ podSelector, ...access })).rejects.toMatchObject({
      code: "KV_CONFIG_INVALID",
    });
});

test("without the optional package, the error says what to install", async () => {
  const missing = new Error("Cannot find package '@kubernetes/client-node'");
  const connection = new ApiConnection({}, () => Promise.reject(missing));
  await expect(connection.namespace()).rejects.toMatchObject({
    code: "KV_CONFIG_INVALID",
    message: expect.stringContaining("needs the package @kubernetes/client-node"),
    hint: expect.stringContaining("npm install @kubernetes/client-node@1"),
  });
});

test("after close, nothing is reported and no connection is left", async () => {
  const { server, seen, errors, close } = await follow([pod("p1", "10.0.0.1")]);
  await watched(server);
  await expect.poll(() => seen.length).toBe(1);
  const ended = new Promise((resolve) => server.watches[0]?.response.once("close", resolve));
  close();
  await ended;
  expect([seen.length, errors]).toEqual([1, []]);
});
