// A long suite: Helm renders the chart, which `npm run chart` builds from the shapes of deploy/.

import { spawnSync } from "node:child_process";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { beforeAll, describe, expect, test } from "vitest";
import { parseAllDocuments } from "yaml";
import { fetchHelm, findHelm, render, writeChart } from "./chart.mjs";
import { buildShape, type KubernetesObject, SHAPES } from "./kubernetes-objects.js";

const inCi = process.env["CI"] === "true";
const missing =
  inCi || findHelm() !== undefined ? undefined : "helm is missing: npm run lint:deploy";
const work = scratchFolder();
let chart = "";
let helm = "";

beforeAll(async () => {
  if (missing !== undefined) return;
  helm = await fetchHelm();
  chart = await writeChart(work);
}, 600_000);

const rendered = (...values: string[]): KubernetesObject[] =>
  parseAllDocuments(render(helm, chart, values)).map((each) => each.toJS() as KubernetesObject);

/** Objects by kind and name; what is JSON in a ConfigMap is read. */
const byName = (objects: readonly KubernetesObject[]) =>
  Object.fromEntries(
    objects.map((object) => {
      const config = object.data?.["config.json"];
      const data = config === undefined ? object.data : { "config.json": JSON.parse(config) };
      return [`${object.kind} ${object.metadata.name}`, { ...object, data }] as const;
    }),
  );

const deploymentOf = (objects: readonly KubernetesObject[], name: string) => {
  const found = objects.find(
    ({ kind, metadata }) => kind === "Deployment" && metadata.name === name,
  );
  if (found === undefined) throw new Error(`there is no Deployment ${name}`);
  return found;
};
const containerOf = (objects: readonly KubernetesObject[], name: string) =>
  deploymentOf(objects, name).spec?.template?.spec.containers[0];

describe.skipIf(missing)(`the Helm chart (${missing ?? "rendered by helm"})`, () => {
  test.each(SHAPES)("with shape=%s and no other value is what kustomize builds", (shape) => {
    const objects = rendered(`shape=${shape}`);
    for (const { kind, spec } of objects) {
      if (kind !== "Deployment" || spec?.template === undefined) continue;
      const { metadata } = spec.template as { metadata: { annotations?: object } };
      expect(Object.keys(metadata.annotations ?? {})).toEqual(["checksum/values"]);
      delete metadata.annotations;
    }
    expect(byName(objects)).toEqual(byName(buildShape(shape) ?? []));
  });

  test("values reach what runs, and pods are replaced when one changes", () => {
    const objects = rendered(
      "prefill.replicas=3",
      "decode.replicas=5",
      "frontEnd.replicas=4",
      "model=Qwen/Qwen3-32B",
      "images.kv-proxy=registry.local/kv-proxy:1",
      "prefill.args={--tensor-parallel-size=2,--max-num-seqs=64}",
      "decode.resources.limits.memory=8Gi",
      "frontEnd.config.timeouts.graceMs=60000",
    );
    const replicas = ["prefill", "decode", "kv-proxy"].map(
      (name) => (deploymentOf(objects, name).spec as { replicas?: number }).replicas,
    );
    expect(replicas).toEqual([3, 5, 4]);
    expect(containerOf(objects, "prefill")?.args.slice(-2)).toEqual([
      "--tensor-parallel-size=2",
      "--max-num-seqs=64",
    ]);
    expect(containerOf(objects, "kv-proxy")?.image).toBe("registry.local/kv-proxy:1");
    expect(containerOf(objects, "decode")).toMatchObject({
      resources: { limits: { memory: "8Gi" } },
    });
    const all = Object.values(byName(objects)).map(({ data }) => data ?? {});
    expect(all).toContainEqual(expect.objectContaining({ MODEL: "Qwen/Qwen3-32B" }));
    const config = all.find((data) => "config.json" in data);
    expect(config).toMatchObject({
      "config.json": { timeouts: { graceMs: 60_000 }, admin: { port: 9090 } },
    });

    const checksum = (from: readonly KubernetesObject[]): unknown =>
      deploymentOf(from, "decode").spec?.template?.metadata;
    expect(checksum(objects)).not.toEqual(checksum(rendered()));
  });

  test("settings reach the sidecars, and the front end keeps its own", () => {
    const data = (...values: string[]) =>
      Object.entries(byName(rendered("shape=envoy", ...values))).flatMap(([name, object]) => {
        const config = (object.data as Record<string, unknown> | undefined)?.["config.json"];
        return config === undefined ? [] : [{ name: name.replace(/-[^-]*$/, ""), config }];
      });
    const given = data("sidecar.config.timeouts.graceMs=60000");
    for (const { name, config } of data()) {
      const timeouts = { graceMs: 60_000 };
      const expected = name.includes("kv-sidecar")
        ? { ...(config as object), timeouts: expect.objectContaining(timeouts) }
        : config;
      expect(given).toContainEqual({ name, config: expected });
    }
  });

  test("monitoring=true adds PodMonitors, the alert rules and the dashboard", () => {
    const kinds = rendered("monitoring.enabled=true").map(
      ({ kind, metadata }) => `${kind} ${metadata.name}`,
    );
    expect(kinds).toEqual(
      expect.arrayContaining([
        "PodMonitor kv-proxy",
        "PodMonitor vllm",
        "PrometheusRule kv",
        "ConfigMap kv-dashboard",
      ]),
    );
  });

  test.each([
    ["shape=swarm", /shape/],
    ["prefil.replicas=2", /prefil/],
    ["decode.replicas=many", /replicas/],
  ])("%s is refused", (value, message) => {
    expect(() => rendered(value)).toThrow(message);
  });

  test("helm finds nothing wrong", () => {
    const { status, stdout, stderr } = spawnSync(helm, ["lint", "--strict", chart], {
      encoding: "utf8",
    });
    expect({ status, stderr }, stdout).toEqual({ status: 0, stderr: "" });
  });
});
