import {
  createPrivateKey,
  generateKeyPairSync,
  randomBytes,
  sign,
  X509Certificate,
} from "node:crypto";
import { readFileSync, statSync } from "node:fs";
import { type Clock, KvError, type Log, type Timer } from "@kv/interface";

/** A certificate and its key, as PEM. */
export interface CertificatePair {
  /** With its chain. */
  readonly certificate: Buffer;
  /** PKCS #8, or another form that Node reads. */
  readonly privateKey: Buffer;
}

const TEN_YEARS_MS = 10 * 365 * 86_400_000;

/**
 * Makes a certificate of `commonName` for `localhost` that is signed with its own key (ECDSA
 * P-256). It encrypts; who connects cannot verify it.
 */
export function selfSigned(commonName: string, nowMs: number): CertificatePair {
  const { privateKey, publicKey } = generateKeyPairSync("ec", { namedCurve: "prime256v1" });
  const ecdsaWithSha256 = sequence(oid("2a8648ce3d040302"));
  const name = sequence(der(0x31, sequence(oid("550403"), der(0x0c, Buffer.from(commonName)))));
  const subjectAltName = sequence(
    oid("551d11"),
    der(
      0x04,
      sequence(der(0x82, Buffer.from("localhost")), der(0x87, Buffer.from([127, 0, 0, 1]))),
    ),
  );
  const serial = randomBytes(16);
  // Positive, and without a zero at its begin.
  serial[0] = ((serial[0] ?? 0) & 0x3f) | 0x40;
  const body = sequence(
    der(0xa0, der(0x02, Buffer.from([2]))),
    der(0x02, serial),
    ecdsaWithSha256,
    name,
    sequence(time(nowMs - 3_600_000), time(nowMs + TEN_YEARS_MS)),
    name,
    publicKey.export({ format: "der", type: "spki" }),
    der(0xa3, sequence(subjectAltName)),
  );
  const signature = sign("sha256", body, privateKey);
  const certificate = sequence(body, ecdsaWithSha256, der(0x03, Buffer.from([0]), signature));
  return {
    certificate: Buffer.from(
      `-----BEGIN CERTIFICATE-----\n${certificate.toString("base64").replace(/.{64}(?=.)/g, "$&\n")}\n-----END CERTIFICATE-----\n`,
    ),
    privateKey: Buffer.from(privateKey.export({ format: "pem", type: "pkcs8" })),
  };
}

function der(tag: number, ...content: readonly Uint8Array[]): Buffer {
  const bytes = Buffer.concat(content);
  const { length } = bytes;
  const head =
    length < 0x80 ? [length] : length < 0x100 ? [0x81, length] : [0x82, length >> 8, length & 0xff];
  return Buffer.concat([Buffer.from([tag, ...head]), bytes]);
}

function sequence(...content: readonly Uint8Array[]): Buffer {
  return der(0x30, ...content);
}

function oid(hex: string): Buffer {
  return der(0x06, Buffer.from(hex, "hex"));
}

/** `GeneralizedTime`. */
function time(ms: number): Buffer {
  return der(0x18, Buffer.from(`${new Date(ms).toISOString().replace(/[-:T]|\.\d+/g, "")}`));
}

/**
 * Reads a certificate and its key. Errors: `KV_CONFIG_INVALID` where one cannot be read, or they do
 * not belong together.
 */
function readCertificate({ certFile, keyFile }: CertificateFiles): CertificatePair {
  try {
    const pair = { certificate: readFileSync(certFile), privateKey: readFileSync(keyFile) };
    if (new X509Certificate(pair.certificate).checkPrivateKey(createPrivateKey(pair.privateKey)))
      return pair;
  } catch (cause) {
    const message = `the certificate ${certFile} with the key ${keyFile} cannot be read: ${(cause as Error).message}`;
    throw new KvError("KV_CONFIG_INVALID", message, { hint: "give PEM files", cause });
  }
  throw new KvError(
    "KV_CONFIG_INVALID",
    `${keyFile} is not the key of the certificate ${certFile}`,
    {
      hint: "give the key that belongs to the certificate",
    },
  );
}

/** PEM files of a certificate with its chain, and of its key. */
export interface CertificateFiles {
  /** Path of the certificate. */
  readonly certFile: string;
  /** Path of its key. */
  readonly keyFile: string;
}

const LOOK_MS = 5_000;

type Listener = (pair: CertificatePair) => void;

/**
 * The certificate of a listener: from files, which are read again when one of them has changed, or
 * one that is made at the start. A pair that is not valid is logged, and the one before stays.
 */
export class Certificate {
  readonly #log: Log;
  readonly #clock: Clock;
  readonly #listeners = new Set<Listener>();
  #pair: CertificatePair;
  #seen = "";
  #timer: Timer | undefined;

  /** `true` makes one of `commonName`. Errors: as `readCertificate`. */
  constructor(
    files: CertificateFiles | true,
    {
      commonName,
      clock,
      log,
    }: { readonly commonName: string; readonly clock: Clock; readonly log: Log },
  ) {
    this.#clock = clock;
    this.#log = log;
    if (files === true) {
      this.#pair = selfSigned(commonName, clock.now());
      return;
    }
    this.#seen = stateOf(files);
    this.#pair = readCertificate(files);
    this.#timer = clock.setTimer(() => this.#look(files), LOOK_MS);
  }

  /** The present one. */
  get pair(): CertificatePair {
    return this.#pair;
  }

  /** Calls `listener` with each further one, until the function that it returns is called. */
  onChange(listener: Listener): () => void {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }

  /** Ends the reading. */
  close(): void {
    this.#timer?.cancel();
  }

  #look(files: CertificateFiles): void {
    this.#timer = this.#clock.setTimer(() => this.#look(files), LOOK_MS);
    const state = stateOf(files);
    if (state === this.#seen) return;
    this.#seen = state;
    try {
      this.#pair = readCertificate(files);
    } catch (error) {
      this.#log.warn("certificate-not-read", { error });
      return;
    }
    this.#log.info("certificate-read", { file: files.certFile });
    for (const listener of this.#listeners) listener(this.#pair);
  }
}

/** What changes with the files. Kubernetes replaces them by renaming a link. */
function stateOf({ certFile, keyFile }: CertificateFiles): string {
  return [certFile, keyFile]
    .map((file) => {
      const stat = statSync(file, { throwIfNoEntry: false });
      return `${stat?.ino} ${stat?.mtimeMs} ${stat?.size}`;
    })
    .join(" ");
}
