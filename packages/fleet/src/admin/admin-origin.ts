import { createHash, timingSafeEqual } from "node:crypto";
import type { IncomingHttpHeaders } from "node:http";
import { isIP } from "node:net";
import { shortened } from "@kv/http";
import { KvError } from "@kv/interface";

/** Whom an admin listener serves. */
export interface AdminHosts {
  readonly host: string;
  readonly token?: string | undefined;
  readonly allowedHosts: readonly string[];
}

/**
 * Refuses what a page of another site can have a browser send to the admin routes: a request of
 * another origin, and one to a name that the page's owner has pointed to this machine (DNS
 * rebinding). An IP address cannot be pointed anywhere.
 *
 * @throws `KV_REQUEST_INVALID` with the status 403.
 */
export function checkAdminRequest(headers: IncomingHttpHeaders, settings: AdminHosts): void {
  const { host = "", origin } = headers;
  const name = host.replace(/:\d+$/, "").toLowerCase();
  if (!isAllowed(name, settings)) {
    throw forbidden(
      `the Host of the request is ${shortened(host)}, which the admin routes do not serve`,
      "use an IP address or localhost, or name the host in admin.allowedHosts (--admin-allowed-host)",
    );
  }
  if (
    origin === undefined ||
    /^https?:\/\/(.*)$/i.exec(origin)?.[1]?.toLowerCase() === host.toLowerCase()
  )
    return;
  throw forbidden(
    `the request comes from a page of another origin, ${shortened(origin)}`,
    "open the page of the admin port itself",
  );
}

function isAllowed(name: string, { host, token, allowedHosts }: AdminHosts): boolean {
  if (isIP(name.replace(/^\[(.*)\]$/, "$1")) !== 0 || name === "localhost") return true;
  if (name === host.toLowerCase() || allowedHosts.some((allowed) => allowed.toLowerCase() === name))
    return true;
  // A page that rebinds a name does not know the token.
  return token !== undefined && allowedHosts.length === 0;
}

function forbidden(message: string, hint: string): KvError {
  return new KvError("KV_REQUEST_INVALID", message, { hint, details: { httpStatus: 403 } });
}

/**
 * Refuses a request without the token, where one is set. `otherwise` is a token from elsewhere than
 * the header.
 *
 * @throws `KV_REQUEST_INVALID` with the status 401.
 */
export function requireToken(
  authorization: string | undefined,
  token: string | undefined,
  otherwise?: unknown,
): void {
  if (token === undefined) return;
  const received =
    authorization?.startsWith("Bearer ") === true
      ? authorization.slice("Bearer ".length)
      : otherwise;
  const digest = (text: string) => createHash("sha256").update(text).digest();
  if (typeof received === "string" && timingSafeEqual(digest(received), digest(token))) return;
  throw new KvError("KV_REQUEST_INVALID", "the token of the admin routes is missing or wrong", {
    hint: "send Authorization: Bearer TOKEN",
    details: { httpStatus: 401 },
  });
}
