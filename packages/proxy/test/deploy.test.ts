import { readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { expect, test } from "vitest";
import { parseAllDocuments } from "yaml";
import { parseCli } from "../src/cli-options.js";
import { readSettings } from "../src/options.js";

const read = (path: string) =>
  readFileSync(fileURLToPath(new URL(`../deploy/${path}`, import.meta.url)), "utf8");

interface Manifest {
  kind: string;
  metadata: { name: string };
  data: { "config.json": string };
  spec: {
    selector: Record<string, unknown>;
    ports: { port: number; targetPort?: string }[];
    template: {
      metadata: { labels: Record<string, string> };
      spec: {
        terminationGracePeriodSeconds: number;
        containers: {
          ports: { name: string; containerPort: number }[];
          env: { name: string }[];
          readinessProbe: { httpGet: { path: string; port: string } };
          volumeMounts: { name: string; mountPath: string }[];
        }[];
        volumes: { name: string; configMap: { name: string } }[];
      };
    };
  };
}

const documents = parseAllDocuments(read("kubernetes/kv-proxy.yaml"));
const manifests = documents.map((document) => document.toJS() as Manifest);
const of = (kind: string, name: string) => {
  const found = manifests.find((manifest) => manifest.kind === kind && manifest.metadata.name === name);
  if (found === undefined) throw new Error(`there is no ${kind} ${name}`);
  return found;
};

test("the manifests are YAML, each of a kind and a name, none twice", () => {
  expect(documents.flatMap(({ errors, warnings }) => [...errors, ...warnings])).toEqual([]);
  const names = manifests.map(({ kind, metadata }) => `${kind}/${metadata.name}`);
  expect(new Set(names).size).toBe(names.length);
});

test("the configuration in them is one that the proxy takes, with the token from the environment", () => {
  const sources = {
    readFile: () => of("ConfigMap", "kv-proxy").data["config.json"],
    env: { KV_PROXY_ADMIN_TOKEN: "sixteen letters!" },
  };
  const { settings, host, port } = parseCli(["--config", "config.json"], sources);
  expect({ host, port }).toEqual({ host: "0.0.0.0", port: 8000 });
  const { admin, timeouts, discovery } = readSettings(settings);
  const pod = of("Deployment", "kv-proxy").spec.template;
  const [container] = pod.spec.containers;
  expect(container?.env.map(({ name }) => name)).toEqual(["KV_PROXY_ADMIN_TOKEN"]);
  expect(container?.ports).toEqual([
    { name: "http", containerPort: port },
    { name: "admin", containerPort: admin?.port },
  ]);
  expect(pod.spec.terminationGracePeriodSeconds * 1000).toBeGreaterThan(timeouts.graceMs);
  for (const name of [discovery?.dns?.prefill, discovery?.dns?.decode]) {
    const [service = "", servicePort] = (name ?? "").split(":");
    expect(of("Service", service).spec.ports[0]?.port).toBe(Number(servicePort));
  }
  expect(of("Service", "kv-proxy").spec.selector).toEqual(pod.metadata.labels);
  expect(pod.spec.volumes[0]?.configMap.name).toBe("kv-proxy");
  expect(container?.volumeMounts[0]?.mountPath).toBe("/etc/kv-proxy");
});

test("the container file starts what the package ships, as nobody special", () => {
  const text = read("Containerfile").replaceAll(/\\\n/g, " ");
  const steps = text
    .split("\n")
    .filter((each) => each !== "" && !each.startsWith("#"))
    .map((each) => each.split(" ")[0]);
  expect(steps[0]).toBe("FROM");
  for (const step of steps)
    expect(["FROM", "WORKDIR", "COPY", "RUN", "USER", "ENV", "EXPOSE", "ENTRYPOINT", "CMD"]).toContain(step);
  const entry = JSON.parse(/^ENTRYPOINT (.*)$/m.exec(text)?.[1] ?? "[]") as string[];
  const manifest = JSON.parse(readFileSync(new URL("../package.json", import.meta.url), "utf8")) as {
    bin: Record<string, string>;
  };
  expect(entry.at(-1)).toBe(`node_modules/@kv/proxy/${manifest.bin["kv-proxy"]?.replace("./", "")}`);
  expect(JSON.parse(/^CMD (.*)$/m.exec(text)?.[1] ?? "[]")).toEqual([
    "--config",
    "/etc/kv-proxy/config.json",
  ]);
  expect(text).toMatch(/^USER node$/m);
});
