// node tools/deploy/kustomize.mjs FOLDER: prints the manifests of a shape of deploy/. kustomize is
// found on PATH or in the user's cache; with CI=true it is built into that cache, and otherwise the
// exit code is 3 where it is missing.
import { spawnSync } from "node:child_process";
import { fileURLToPath } from "node:url";
import { goTool } from "../setup/go-tools.mjs";
import { root } from "../setup/setup.mjs";

export const { find: findKustomize, fetch: fetchKustomize } = goTool({
  name: "kustomize",
  version: "5.8.1",
  source: "sigs.k8s.io/kustomize/kustomize/v5",
  probe: ["version"],
});

/** The folders of deploy/ that are applied. */
export const SHAPES = ["proxy", "envoy", "llm-d", "efa", "eight-gpus"];

/** The manifests of a folder as YAML. */
export function build(kustomize, folder) {
  const { status, stdout, stderr } = spawnSync(kustomize, ["build", folder], {
    cwd: root,
    encoding: "utf8",
  });
  if (status !== 0) throw new Error(`kustomize build ${folder}: ${stderr.trim()}`);
  return stdout;
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  const kustomize = process.env.CI === "true" ? await fetchKustomize() : findKustomize();
  if (kustomize === undefined) process.exitCode = 3;
  else process.stdout.write(build(kustomize, process.argv[2] ?? ""));
}
