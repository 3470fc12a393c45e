# Reference values of tests/model/test_against_r.py. Run in a folder with sleepstudy.csv, cbpp.csv (tests/r_tables.py) and
# radon.csv (covey.datasets.load_radon):  Rscript inference.R > inference.json
suppressMessages({library(lme4); library(lmerTest); library(emmeans); library(performance); library(clubSandwich); library(jsonlite)})
emm_options(lmer.df = "satterthwaite")
exact <- lmerControl(optimizer = "bobyqa", optCtrl = list(rhobeg = 0.2, rhoend = 1e-12, maxfun = 1e5), calc.derivs = FALSE)
close <- glmerControl(optimizer = "bobyqa", optCtrl = list(rhoend = 1e-10, maxfun = 1e5), tolPwrss = 1e-12)
sleep <- read.csv("sleepstudy.csv", stringsAsFactors = TRUE)
sleep$Subject <- factor(sleep$Subject)
herds <- read.csv("cbpp.csv", stringsAsFactors = TRUE)
herds$herd <- factor(herds$herd, levels = unique(herds$herd))
homes <- read.csv("radon.csv", stringsAsFactors = TRUE)
homes$place <- factor(ifelse(homes$floor == 0, "basement", "upper"))

variances <- function(model, group) apply(attr(ranef(model, condVar = TRUE)[[group]], "postVar"), 3, diag)
pick <- function(frame, names) lapply(names, function(name) unname(frame[[name]]))
means <- function(found) { s <- summary(found, infer = TRUE); list(estimate = s[[attr(s, "estName")]], se = s$SE, df = s$df,
  lower = s[[attr(s, "clNames")[1]]], upper = s[[attr(s, "clNames")[2]]], p = s$p.value) }
table <- function(...) { a <- suppressMessages(anova(...)); list(parameters = a$npar, aic = a$AIC, bic = a$BIC, loglik = a$logLik,
  statistic = a$Chisq[2], df = a$Df[2], p = a$`Pr(>Chisq)`[2]) }
robust <- function(model, types, ...) sapply(types, function(type) { V <- vcovCR(model, type = type, ...)
  list(cov = unname(as.matrix(V)), df = coef_test(model, vcov = V, test = "Satterthwaite")$df_Satt) }, simplify = FALSE)

slopes <- lmer(Reaction ~ Days * half + (Days | Subject), sleep, control = exact)
one <- lmer(Reaction ~ Days + (1 | Subject), sleep, control = exact)
two <- lmer(Reaction ~ Days + (Days | Subject), sleep, control = exact)
two_ml <- lme4::lmer(Reaction ~ Days + (Days | Subject), sleep, REML = FALSE, control = exact)
one_ml <- lme4::lmer(Reaction ~ Days + (1 | Subject), sleep, REML = FALSE, control = exact)
grid <- emmeans(slopes, ~ half)
out <- list(versions = sapply(c("lme4", "lmerTest", "emmeans", "performance", "clubSandwich", "insight"),
                              function(p) as.character(packageVersion(p))))
out$slopes <- list(
  coefficients = unname(fixef(slopes)), cov = unname(as.matrix(vcov(slopes))),
  residuals = unname(resid(slopes))[1:12], deviations = unname(as.matrix(ranef(slopes)$Subject)),
  variances = t(variances(slopes, "Subject")), means = means(grid), pairs = means(pairs(grid)),
  at = means(emmeans(slopes, ~ half | Days, at = list(Days = c(0, 9)))), tukey = {
    five <- sleep; five$z <- factor(five$z); m <- lmer(Reaction ~ z + Days + (1 | Subject), five, control = exact)
    list(pairs = means(pairs(emmeans(m, ~ z))), plain = means(pairs(emmeans(m, ~ z), adjust = "none")),
         means = means(emmeans(m, ~ z)), holm = means(pairs(emmeans(m, ~ z), adjust = "holm"))) },
  r2 = unlist(r2_nakagawa(two)), robust = robust(lme4::lmer(Reaction ~ Days * half + (Days | Subject), sleep, control = exact),
    c("CR0", "CR1", "CR1p", "CR1S", "CR2", "CR3")))
out$comparison <- list(effects = table(one, two), common = table(two, slopes))
wald <- function(model, which = "theta_") { p <- profile(model, delta = 0.02, maxpts = 2000, alphamax = 0.02, which = which, devtol = 1e-12); unname(confint(p)) }
# The penalty of a term is (sigma / sd)^2: ends of the profile of its relative sd, the length of a row of Lambda, by lme4's deviance.
penalties <- function(model, row) {
  deviance <- update(model, devFunOnly = TRUE); theta <- getME(model, "theta")
  at <- function(value) if (length(theta) == 1) deviance(value) else if (row == 1)
      optim(theta[2:3], function(t) deviance(c(value, t)), method = "BFGS", control = list(reltol = 1e-15, maxit = 500))$value
    else optim(c(theta[1], atan2(theta[3], theta[2])), function(t) deviance(c(t[1], value * cos(t[2]), value * sin(t[2]))),
               method = "BFGS", control = list(reltol = 1e-15, maxit = 500))$value
  best <- if (row == 1) theta[1] else sqrt(sum(theta[2:3]^2))
  rise <- function(value) at(value) - deviance(theta) - qchisq(0.95, 1)
  ends <- c(uniroot(rise, c(best, 5 * best), tol = 1e-12)$root, uniroot(rise, c(best / 10, best), tol = 1e-12)$root)
  c(best, ends)^-2 }
out$profile <- list(one = wald(one_ml), two = wald(two_ml), one_beta = wald(one_ml, "beta_"), two_beta = wald(two_ml, "beta_"),
  one_penalties = list(penalties(one_ml, 1)), two_penalties = list(penalties(two_ml, 1), penalties(two_ml, 2)))
nested <- lme4::lmer(log_radon ~ place + (1 | state/county), homes, control = exact)
out$nested <- list(
  states = levels(homes$state), cov = unname(as.matrix(vcov(nested))), r2 = unlist(r2_nakagawa(nested)),
  state = unname(ranef(nested)$state[[1]]), state_variance = unname(c(attr(ranef(nested, condVar = TRUE)$state, "postVar"))),
  county_names = rownames(ranef(nested)$`county:state`)[1:20],
  county = ranef(nested)$`county:state`[[1]][1:20], county_variance = c(attr(ranef(nested, condVar = TRUE)$`county:state`, "postVar"))[1:20],
  robust = robust(nested, c("CR0", "CR1", "CR2", "CR3"), cluster = homes$state))
herd <- glmer(cbind(incidence, size - incidence) ~ period + (1 | herd), herds, family = binomial, control = close)
flat <- glmer(cbind(incidence, size - incidence) ~ 1 + (1 | herd), herds, family = binomial, control = close)
out$herds <- list(
  coefficients = unname(fixef(herd)), cov = unname(as.matrix(vcov(herd))), herds = levels(herds$herd),
  deviations = unname(ranef(herd)$herd[[1]]), variances = unname(c(attr(ranef(herd, condVar = TRUE)$herd, "postVar"))),
  residuals = sapply(c("response", "pearson", "deviance", "working"), function(kind) unname(resid(herd, type = kind)), simplify = FALSE),
  means = means(emmeans(herd, ~ period)), response = means(emmeans(herd, ~ period, type = "response")),
  pairs = means(pairs(emmeans(herd, ~ period), adjust = "none")), r2 = unlist(r2_nakagawa(herd)),
  comparison = table(flat, herd), profile = { p <- profile(herd, which = "theta_", delta = 0.05); unname(confint(p)) },
  profile_beta = { p <- profile(herd, which = "beta_", delta = 0.05); unname(confint(p)) })
cat(toJSON(out, digits = 12, auto_unbox = FALSE, pretty = FALSE))
