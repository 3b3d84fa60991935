import { readFileSync } from "node:fs";
import { join } from "node:path";
import { expect, test } from "vitest";
import { root, sourceFiles } from "./source-files.js";

/** Product code that listens: HTTP goes through `@kv/http`, and each other listener is named here with what bounds its connections. */
const HTTP_SERVERS = "packages/http/src/http-server.ts";
/** What makes an `HttpServer`. */
const USERS = [
  "apps/demo/src/http/server.ts",
  "packages/epp/src/server/metrics-server.ts",
  "packages/peer/src/cli/watch-command.ts",
  "packages/peer/src/headless/prefill-server.ts",
  "packages/proxy/src/http/admin-server.ts",
  "packages/proxy/src/http/server.ts",
];
/** Listeners of TCP, and the name that counts a client's connections there, an IPv6 /64 as one. */
const TCP_SERVERS: Readonly<Record<string, RegExp | "takes no connection">> = {
  "packages/epp/src/server/grpc-server.ts": /\bnew ClientConnections\(/,
  "packages/nixl/src/bench/target.ts": /\bnew Sessions\(/,
  "packages/nixl/src/metadata/socket-metadata.ts": /\bremoteAddressKey\(/,
  "packages/proxy/src/workers/primary.ts": "takes no connection",
};
/** The listener of the side channel, wherever its package is. */
const SIDE_CHANNEL = /^packages\/(connector|side-channel)\/src\/.*listener\.ts$/;

const files = sourceFiles(root, ["packages", "apps"])
  .filter((path) => /\/src\//.test(path) && !/^packages\/testing\//.test(path))
  .map((path) => ({ path, text: readFileSync(join(root, path), "utf8") }));

/** The files that import a server from one of these modules. */
function importing(modules: string): string[] {
  const pattern = new RegExp(`import \\{[^}]*\\bcreate(Secure)?Server\\b[^}]*\\} from "node:(${modules})"`);
  return files.filter(({ text }) => pattern.test(text)).map(({ path }) => path);
}

test("only packages/http creates HTTP servers", () => {
  expect(importing("http|https|http2|tls")).toEqual([HTTP_SERVERS]);
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

test("a client's address is a key only as remoteAddressKey gives it", () => {
  const lines = files.flatMap(({ path, text }) =>
    text
      .split("\n")
      .filter((line) => /\bsocket\.remoteAddress\b/.test(line) && !line.includes("remoteAddressKey("))
      .map((line) => `${path}: ${line.trim()}`),
  );
  // Words for a person who reads.
  expect(lines.filter((line) => !/\b(from: |const from = )/.test(line))).toEqual([]);
});
