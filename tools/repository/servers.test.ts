import { readFileSync } from "node:fs";
import { join } from "node:path";
import { expect, test } from "vitest";
import { root, sourceFiles } from "./source-files.js";

/**
 * Product code that listens: HTTP goes through `@kv/http`, and each other listener is named here
 * with what bounds its connections.
 */
const HTTP_SERVERS = "packages/http/src/http-server.ts";
/** What makes an `HttpServer`. */
const USERS = [
  "apps/demo/src/http/server.ts",
  "packages/fleet/src/admin/admin-server.ts",
  "packages/peer/src/cli/watch-command.ts",
  "packages/peer/src/headless/prefill-server.ts",
  "packages/proxy/src/http/server.ts",
];
/** Listeners of TCP, and the name that counts a client's connections there, an IPv6 /64 as one. */
const TCP_SERVERS: Readonly<
  Record<string, RegExp | "takes no connection" | "takes one connection">
> = {
  "packages/epp/src/server/grpc-server.ts": /\bnew ClientConnections\(/,
  "packages/nixl/src/bench/target.ts": "takes one connection",
  "packages/pool/src/nixl-disk.ts": "takes no connection",
  "packages/proxy/src/workers/primary.ts": "takes no connection",
};
/** The sockets of ZeroMQ's protocol: its listener and its client. */
const SIDE_CHANNEL = /^packages\/side-channel\/src\//;
/** Clients of TCP beside the side channel, each with the protocol that it speaks. */
const TCP_CLIENTS: Readonly<Record<string, string>> = {
  "packages/nixl/src/bench/initiator.ts": "lines of JSON to the other side of kv-nixl bench",
};
/** What starts processes, beside packages/program, each with its reason. */
const STARTS_PROCESSES: Readonly<Record<string, string>> = {
  "packages/proxy/src/cli.ts": "node:cluster tells a worker from the first process",
  "packages/proxy/src/workers/primary.ts": "node:cluster shares the port between the workers",
};

const files = sourceFiles(root, ["packages", "apps"])
  .filter((path) => /\/src\//.test(path) && !/^packages\/testing\//.test(path))
  .map((path) => ({ path, text: readFileSync(join(root, path), "utf8") }));

/** The files that import this from one of these modules, and not its type alone. */
function importing(modules: string, name = "create(Secure)?Server"): string[] {
  const pattern = new RegExp(
    `import \\{[^}]*\\b(?<!type )${name}\\b[^}]*\\} from "(node:)?(${modules})"`,
  );
  return files.filter(({ text }) => pattern.test(text)).map(({ path }) => path);
}

test("only packages/http creates HTTP servers", () => {
  // An engine of this process, for the two seconds of a warm-up.
  const ownEngine = "packages/proxy/src/workers/warm-up.ts";
  expect(importing("http|https|http2|tls")).toEqual([HTTP_SERVERS, ownEngine]);
});

test("each HTTP server of the programs is one of @kv/http", () => {
  const users = files.filter(({ text }) => /\bnew HttpServer\(/.test(text)).map(({ path }) => path);
  expect(users.sort()).toEqual(USERS);
});

test("each listener of TCP is known, and counts an IPv6 /64 as one client", () => {
  const servers = importing("net").filter((path) => !SIDE_CHANNEL.test(path));
  expect(servers.sort()).toEqual(Object.keys(TCP_SERVERS));
  for (const { path, text } of files) {
    const counts = TCP_SERVERS[path];
    if (counts instanceof RegExp) expect(text, path).toMatch(counts);
  }
});

test("only the side channel opens sockets of ZeroMQ, and each other client of TCP is known", () => {
  const clients = importing("net|tls", "(connect|createConnection|Socket|TLSSocket)");
  expect(clients.filter((path) => !SIDE_CHANNEL.test(path)).sort()).toEqual(
    Object.keys(TCP_CLIENTS),
  );
  expect(clients.some((path) => SIDE_CHANNEL.test(path))).toBe(true);
  expect(
    files.filter(({ text }) =>
      /["']zeromq["']|\bimport \* as \w+ from "node:(net|tls)"/.test(text),
    ),
  ).toEqual([]);
});

test("only packages/program starts processes", () => {
  const modules = /(?<!import type \{[^}]*\} from )"(node:(child_process|cluster)|child_process)"/;
  const starting = files.filter(({ text }) => modules.test(text)).map(({ path }) => path);
  const others = starting.filter((path) => !path.startsWith("packages/program/src/"));
  expect(others.sort()).toEqual(Object.keys(STARTS_PROCESSES));
  expect(starting.length).toBeGreaterThan(others.length);
});

test("field.md P1: only @kv/protocol reads the text of a notification", () => {
  const readers = files.filter(
    ({ path, text }) =>
      !path.startsWith("packages/protocol/") &&
      /["'](HB|PUSH_REG|KV1):|lastIndexOf\(":"\)/.test(text),
  );
  expect(readers.map(({ path }) => path)).toEqual([]);
});

test("a client's address is a key only as remoteAddressKey gives it", () => {
  const lines = files.flatMap(({ path, text }) =>
    text
      .split("\n")
      .filter(
        (line) => /\bsocket\.remoteAddress\b/.test(line) && !line.includes("remoteAddressKey("),
      )
      .map((line) => `${path}: ${line.trim()}`),
  );
  // Words for a person who reads.
  expect(lines.filter((line) => !/\b(from: |const from = )/.test(line))).toEqual([]);
});
