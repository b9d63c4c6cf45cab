//! Everything on the one port: the gRPC service, `GET /status.json` and `GET /metrics`, each behind the run's token.
//!
//! Requests are authenticated from their headers, before a byte of their body is decoded.

use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tonic::Status;
use tonic::service::Routes;

use super::identity::{authenticate, secret_matches};
use super::metrics;
use super::service::{Caller, Service, Shared};
use crate::torchft::lighthouse_service_server::LighthouseServiceServer;

/// Longest request body that is decoded.
const MAX_REQUEST_BYTES: usize = 1 << 20;

/// What the routes need.
#[derive(Clone)]
struct Context {
    shared: Shared,
    token: Option<Arc<str>>,
    run_id: Arc<str>,
}

/// All routes, authenticated.
pub fn routes(shared: Shared, token: Option<&str>, run_id: &str) -> Routes {
    let service = LighthouseServiceServer::new(Service::new(shared.clone()))
        .max_decoding_message_size(MAX_REQUEST_BYTES);
    let context = Context { shared, token: token.map(Arc::from), run_id: Arc::from(run_id) };
    let grpc = Routes::new(service)
        .into_axum_router()
        .layer(from_fn_with_state(context.clone(), authenticate_replica));
    let pages = Router::new()
        .route("/status.json", get(status_json))
        .route("/metrics", get(metrics_text))
        .layer(from_fn_with_state(context.clone(), authenticate_reader))
        .with_state(context);
    Routes::from(pages.merge(grpc))
}

async fn authenticate_replica(State(context): State<Context>, mut request: Request, next: Next) -> Response {
    let authority = request.uri().authority().map(|authority| authority.as_str());
    match authenticate(authority, context.token.as_deref()) {
        Ok(identity) => {
            request.extensions_mut().insert(Caller(identity));
            next.run(request).await
        }
        // Whoever does not speak gRPC would take its answer, whose status is 200, for a success.
        Err(_) if !is_grpc(request.headers()) => refused(),
        Err(why) => Status::unauthenticated(why.to_string()).into_http::<Body>(),
    }
}

async fn authenticate_reader(State(context): State<Context>, request: Request, next: Next) -> Response {
    let Some(token) = context.token.as_deref() else { return next.run(request).await };
    if bearer(request.headers()).is_some_and(|given| secret_matches(given, token)) {
        return next.run(request).await;
    }
    refused()
}

fn is_grpc(headers: &HeaderMap) -> bool {
    headers.get(header::CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"))
}

fn refused() -> Response {
    let body = r#"{"error": {"kind": "unauthenticated", "message": "no valid bearer token", "hint": null}}"#;
    let headers = [(header::WWW_AUTHENTICATE, "Bearer"), (header::CONTENT_TYPE, "application/json")];
    (StatusCode::UNAUTHORIZED, headers, body).into_response()
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    headers.get(header::AUTHORIZATION)?.to_str().ok()?.strip_prefix("Bearer ")
}

async fn status_json(State(context): State<Context>) -> Response {
    let snapshot = context.shared.lock().snapshot(Instant::now());
    let shown = serde_json::json!({
        "run_id": &*context.run_id,
        "pid": std::process::id(),
        "version": env!("CARGO_PKG_VERSION"),
        "lighthouse": snapshot,
    });
    ([(header::CONTENT_TYPE, "application/json")], shown.to_string()).into_response()
}

async fn metrics_text(State(context): State<Context>) -> Response {
    let snapshot = context.shared.lock().snapshot(Instant::now());
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], metrics::render(&snapshot)).into_response()
}
