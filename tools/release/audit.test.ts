import { writeFileSync } from "node:fs";
import { createServer } from "node:http";
import { join } from "node:path";
import { sendJson } from "@kv/testing/http/fake-upstream";
import { listening } from "@kv/testing/http/listening";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { expect, test } from "vitest";
import { auditProblems, scriptProblems } from "./audit.js";

const folder = scratchFolder();

const project = { name: "empty", version: "0.0.0" };
const packages = {
  "": { ...project, dependencies: { weak: "1.0.0", protobufjs: "7.0.0" } },
  "node_modules/weak": { version: "1.0.0", hasInstallScript: true },
  "node_modules/protobufjs": { version: "7.0.0", hasInstallScript: true },
};
writeFileSync(join(folder, "package.json"), JSON.stringify(packages[""]));
writeFileSync(
  join(folder, "package-lock.json"),
  JSON.stringify({ ...project, lockfileVersion: 3, packages }),
);

/**
 * `npm audit` against a registry that answers each request for advisories with `status` and `body`.
 */
async function auditedBy(status: number, body: object): Promise<string[] | undefined> {
  const server = createServer((request, response) => {
    request.resume();
    if (request.url?.endsWith("/advisories/bulk")) sendJson(response, body, status);
    else sendJson(response, {}, 404);
  });
  const url = `http://127.0.0.1:${await listening(server)}/`;
  return await auditProblems(folder, url).finally(() => {
    server.close();
    server.closeAllConnections();
  });
}

test("npm audit: a known vulnerability is a problem, none is none, and a registry without audits is told apart", async () => {
  const advisory = {
    id: 1,
    url: "u",
    title: "t",
    severity: "high",
    vulnerable_versions: "<2.0.0",
    cwe: [],
  };
  expect(await auditedBy(200, { weak: [advisory] })).toEqual([
    "installs weak, which has a known vulnerability (high)",
  ]);
  expect(await auditedBy(200, {})).toEqual([]);
  expect(await auditedBy(405, {})).toBeUndefined();
}, 60_000);

test("a package that runs a script when it is installed is a problem, unless it is known", async () => {
  expect(await scriptProblems(folder)).toEqual(["installs weak, which runs a script then"]);
});
