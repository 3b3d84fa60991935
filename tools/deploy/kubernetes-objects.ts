import { spawnSync } from "node:child_process";
import { join } from "node:path";
import { parseAllDocuments } from "yaml";

/** The folders of deploy/ that are applied. */
export const SHAPES = ["proxy", "envoy", "llm-d", "efa", "eight-gpus"] as const;
export type Shape = (typeof SHAPES)[number];

export type Labels = Readonly<Record<string, string>>;

interface Selector {
  readonly matchLabels?: Labels;
  readonly matchExpressions?: readonly {
    readonly key: string;
    readonly operator: string;
    readonly values?: string[];
  }[];
}

export interface Container {
  readonly name: string;
  readonly image: string;
  readonly args: readonly string[];
  readonly env?: readonly {
    readonly name: string;
    readonly value?: string;
    readonly valueFrom?: {
      readonly configMapKeyRef?: { readonly name: string; readonly key: string };
    };
  }[];
  readonly ports: readonly { readonly name: string; readonly containerPort: number }[];
  readonly volumeMounts: readonly { readonly name: string; readonly mountPath: string }[];
  readonly securityContext: object;
  readonly readinessProbe: Probe;
  readonly livenessProbe: Probe;
}

export interface Probe {
  readonly httpGet?: { readonly path: string; readonly port: number | string };
  readonly tcpSocket?: { readonly port: number | string };
  readonly grpc?: { readonly port: number; readonly service: string };
}

export interface PodTemplate {
  readonly metadata: { readonly labels: Labels };
  readonly spec: {
    readonly serviceAccountName?: string;
    readonly automountServiceAccountToken?: boolean;
    readonly terminationGracePeriodSeconds: number;
    readonly securityContext: object;
    readonly containers: readonly Container[];
    readonly initContainers?: readonly Container[];
    readonly volumes: readonly {
      readonly name: string;
      readonly configMap?: { readonly name: string };
    }[];
  };
}

interface Peer {
  readonly podSelector?: Selector;
  readonly namespaceSelector?: Selector;
}

/** An object of Kubernetes, with the members that the tests read. */
export interface KubernetesObject {
  readonly apiVersion: string;
  readonly kind: string;
  readonly metadata: { readonly name: string };
  readonly data?: Labels;
  readonly rules?: unknown;
  readonly subjects?: readonly { readonly name: string }[];
  readonly roleRef?: { readonly name: string };
  readonly spec?: {
    readonly template?: PodTemplate;
    readonly selector?: Selector & Labels;
    readonly podSelector?: Selector;
    readonly ports?: readonly { readonly port: number; readonly targetPort: string }[];
    readonly ingress?: readonly {
      readonly from?: readonly Peer[];
      readonly ports?: readonly { readonly port: number | string; readonly endPort?: number }[];
    }[];
    readonly targetPorts?: readonly { readonly number: number }[];
    readonly endpointPickerRef?: {
      readonly name: string;
      readonly port: { readonly number: number };
    };
  };
}

/**
 * The objects of a shape as kustomize builds them; undefined where kustomize is missing. With
 * CI=true it is built instead.
 */
export function buildShape(shape: Shape): readonly KubernetesObject[] | undefined {
  const root = join(import.meta.dirname, "../..");
  const script = join(root, "tools/deploy/kustomize.mjs");
  const { status, stdout, stderr } = spawnSync(process.execPath, [script, `deploy/${shape}`], {
    encoding: "utf8",
    maxBuffer: 8 * 1024 * 1024,
  });
  if (status === 3) return undefined;
  if (status !== 0) throw new Error(stderr);
  return parseAllDocuments(stdout).map((document) => document.toJS() as KubernetesObject);
}

/** Whether a selector takes an object with these labels. An empty one takes all. */
export function selects(
  { matchLabels = {}, matchExpressions = [] }: Selector,
  labels: Labels,
): boolean {
  return (
    Object.entries(matchLabels).every(([key, value]) => labels[key] === value) &&
    matchExpressions.every(({ key, operator, values = [] }) => {
      if (operator === "Exists") return key in labels;
      if (operator === "In") return values.includes(labels[key] ?? "");
      throw new Error(`no test knows the operator ${operator}`);
    })
  );
}

/**
 * A pod that connects: its labels, and those of its namespace, which is another one than the
 * shape's.
 */
export interface Caller {
  readonly labels?: Labels;
  /** Undefined: the namespace of the shape. */
  readonly namespace?: Labels;
}

/**
 * The ports of a pod that a caller reaches: "all", or their numbers. A pod that no policy selects
 * is open.
 */
export function reachablePorts(
  objects: readonly KubernetesObject[],
  { metadata, spec }: PodTemplate,
  { labels = {}, namespace }: Caller,
): "all" | readonly number[] {
  const policies = objects.filter(
    ({ kind, spec: policy }) =>
      kind === "NetworkPolicy" && selects(policy?.podSelector ?? {}, metadata.labels),
  );
  if (policies.length === 0) return "all";
  const named = [...spec.containers, ...(spec.initContainers ?? [])].flatMap(({ ports }) => ports);
  const number = (port: number | string) =>
    typeof port === "number"
      ? port
      : (named.find(({ name }) => name === port)?.containerPort ?? Number.NaN);
  const isFrom = ({ podSelector, namespaceSelector }: Peer) => {
    const inNamespace =
      namespaceSelector === undefined
        ? namespace === undefined
        : selects(namespaceSelector, namespace ?? {});
    return inNamespace && selects(podSelector ?? {}, labels);
  };
  const open = policies
    .flatMap(({ spec: policy }) => policy?.ingress ?? [])
    .filter(({ from }) => from === undefined || from.some(isFrom));
  if (open.some(({ ports }) => ports === undefined)) return "all";
  const ports = open.flatMap((rule) =>
    (rule.ports ?? []).flatMap(({ port, endPort }) => {
      const first = number(port);
      return Array.from({ length: (endPort ?? first) - first + 1 }, (_, at) => first + at);
    }),
  );
  return [...new Set(ports)].sort((a, b) => a - b);
}
