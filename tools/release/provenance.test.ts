import { spawnSync } from "node:child_process";
import { writeFileSync } from "node:fs";
import { join } from "node:path";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { expect, test } from "vitest";
import { root } from "./packages.js";
import { provenanceOf } from "./provenance.js";

const folder = scratchFolder();

const repository = "git+https://git.example/kv.git";
const publish = () =>
  spawnSync(process.execPath, [join(root, "tools/release/release-publish.mjs"), folder], {
    encoding: "utf8",
    timeout: 30_000,
  });

test("only the files that were rehearsed are published", async () => {
  writeFileSync(join(folder, "order.json"), "[]");
  writeFileSync(join(folder, "image.tar"), "as it was built");
  const provenance = await provenanceOf(folder, { repository, checkout: root });
  expect(provenance.subject.map(({ name }) => name)).toEqual(["image.tar", "order.json"]);
  expect(JSON.stringify(provenance.predicate)).toMatch(/"gitCommit":"[0-9a-f]{40}"/);
  writeFileSync(join(folder, "provenance.json"), JSON.stringify(provenance));
  expect(publish()).toMatchObject({ status: 0, stderr: "" });

  writeFileSync(join(folder, "image.tar"), "changed since");
  expect(publish().stderr).toContain("image.tar has SHA-256");

  writeFileSync(join(folder, "image.tar"), "as it was built");
  writeFileSync(join(folder, "order.json"), '[{ "name": "@kv/plan", "file": "plan.tgz" }]');
  expect(publish().stderr).toContain("order.json has SHA-256");
});
